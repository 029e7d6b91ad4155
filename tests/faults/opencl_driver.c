#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

struct platform { void **functions; };
static struct platform only;
static int platform_info(void *p, unsigned what, size_t room, void *out, size_t *size) {
    const char *said = what == 0x0904 ? "cl_khr_icd" : what == 0x0900 ? "FULL_PROFILE" : "BAD";
    if (size) *size = strlen(said) + 1;
    if (out) memcpy(out, said, strlen(said) + 1);
    return 0;
}
static int device_info(void *d, unsigned what, size_t room, void *out, size_t *size) {
    INFO
}
static int device_ids(void *p, unsigned long kind, unsigned room, void *out, unsigned *count) {
    DEVICES
}
static int platform_ids(unsigned room, void **out, unsigned *count);
static void *functions[200] = {
    (void *)platform_ids, (void *)platform_info, (void *)device_ids, (void *)device_info};
static struct platform only = {functions};
static int platform_ids(unsigned room, void **out, unsigned *count) {
    PLATFORMS
    if (count) *count = 1;
    if (out) *out = &only;
    return 0;
}
int clGetPlatformInfo(void *p, unsigned what, size_t room, void *out, size_t *size) {
    return platform_info(p, what, room, out, size);
}
void *clGetExtensionFunctionAddress(const char *name) {
    if (!strcmp(name, "clIcdGetPlatformIDsKHR")) return (void *)platform_ids;
    if (!strcmp(name, "clGetPlatformInfo")) return (void *)platform_info;
    return NULL;
}
