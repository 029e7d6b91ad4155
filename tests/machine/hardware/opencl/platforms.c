#include <stddef.h>
#include <string.h>
struct said { int device; unsigned what; size_t size; const void *bytes; };
#define TEXT(d, w, t) {d, w, sizeof(t), t}
#define NUMBER(d, w, ...) {d, w, sizeof((int[]){__VA_ARGS__}), (int[]){__VA_ARGS__}}
static const struct said table[] = {
    TEXT(0, 0x0902, "Made"), TEXT(0, 0x0903, "Maker"),
    TEXT(1, 0x102B, " NVIDIA H200 "), TEXT(1, 0x102F, "OpenCL 3.0 CUDA"),
    NUMBER(1, 0x1001, 0x10DE),
    TEXT(1, 0x1030, "cl_khr_fp64 cl_khr_device_uuid cl_nv_device_attribute_query"),
    {1, 0x1000, 8, "\4\0\0\0\0\0\0"}, {1, 0x101F, 8, "\0\0\0\0\2\0\0"},
    {1, 0x106A, 16, "\1\2\3\4\5\6\7\10\11\12\13\14\15\16\17\20"},
    NUMBER(1, 0x4000, 9), NUMBER(1, 0x4001, 0), NUMBER(1, 0x4008, 6), NUMBER(1, 0x4009, 0x0B),
    NUMBER(1, 0x400A, 1),
    TEXT(2, 0x102B, "gfx90a"), TEXT(2, 0x1030, "cl_khr_fp16 cl_amd_device_attribute_query"),
    NUMBER(2, 0x1035, 1), TEXT(2, 0x4038, "AMD Instinct MI210"),
    {2, 0x4037, 24, "\1\0\0\0zzzzzzzzzzzzzzzzz\3\2\1"},
    {2, 0x4039, 16, "\0\4\0\0\0\0\0\0\0\1\0\0\0\0\0"},
    TEXT(3, 0x102B, "Arc"), TEXT(3, 0x1030, "cl_khr_pci_bus_info"), NUMBER(3, 0x410F, 1, 2, 3, 4),
    TEXT(4, 0x102B, "short"),
    TEXT(4, 0x1030, "cl_khr_pci_bus_info cl_nv_device_attribute_query"
         " cl_amd_device_attribute_query"),
    NUMBER(4, 0x410F, 1), NUMBER(4, 0x1032, 63), {4, 0x4037, 4, "\1\0\0"},
    TEXT(5, 0x102B, "bare"), TEXT(5, 0x1030, "cl_nv_device_attribute_query"),
};
static int info(void *handle, unsigned what, size_t room, void *out, size_t *size) {
    for (unsigned i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].device + 1 == (int)(size_t)handle && table[i].what == what) {
            if (size) *size = table[i].size;
            if (out) memcpy(out, table[i].bytes, table[i].size);
            return 0;
        }
    return -30;
}
int platforms = 2, refuse_platforms = 0, refuse_devices = 0, refuse_list = 0;
int clGetPlatformIDs(unsigned room, size_t *out, unsigned *count) {
    if (refuse_platforms) return refuse_platforms;
    if (count) *count = platforms;
    for (int i = 0; i < room; i++) out[i] = i ? 99 : 1;
    return 0;
}
int clGetDeviceIDs(size_t p, unsigned long kind, unsigned room, size_t *out, unsigned *count) {
    if (refuse_devices) return refuse_devices;
    if (p == 99 || kind != 0xFFFFFFFF) return -1;
    if (out && refuse_list) return refuse_list;
    if (count) *count = 5;
    for (int i = 0; i < room; i++) out[i] = i + 2;
    return 0;
}
int clGetPlatformInfo(void *h, unsigned w, size_t r, void *o, size_t *s) {
    return info(h, w, r, o, s);
}
int clGetDeviceInfo(void *h, unsigned w, size_t r, void *o, size_t *s) {
    return info(h, w, r, o, s);
}
