/* A CUDA driver with one card, or an integrated one with INTEGRATED defined; with TWO defined it
   has the two cards of healthy_nvml.c, the second of them first; with OLD defined it lacks the
   second form of the UUID question; with MUTE defined it refuses every detail. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#ifdef MUTE
#define ANSWER 1
#else
#define ANSWER 0
#endif

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 12040; return ANSWER; }
#ifdef TWO
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
#else
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
#endif
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *text, int size, int device) {
  snprintf(text, size, "NVIDIA Test 100");
  return ANSWER;
}
static int fill(unsigned char *bytes, unsigned char first) {
  for (int i = 0; i < 16; i++) bytes[i] = first + i;
  return ANSWER;
}
int cuDeviceGetUuid(unsigned char *bytes, int device) { return fill(bytes, 0x10); }
#ifdef TWO
int cuDeviceGetUuid_v2(unsigned char *bytes, int device) {
  memset(bytes, 0, 16);
  memset(bytes, device == 0 ? 0xbb : 0xaa, 4);
  bytes[6] = 0x40;
  bytes[8] = 0x80;
  bytes[15] = device == 0 ? 2 : 1;
  return 0;
}
#elif !defined(OLD)
int cuDeviceGetUuid_v2(unsigned char *bytes, int device) { return fill(bytes, 0xa0); }
#endif
int cuDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:0A:00.0");
  return ANSWER;
}
int cuDeviceTotalMem_v2(size_t *total, int device) { *total = (size_t)8 << 30; return ANSWER; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 16: *value = 132; break;
#ifdef INTEGRATED
    case 18: *value = 1; break;
#else
    case 18: *value = 0; break;
#endif
    case 20: *value = 0; break;
    case 75: *value = 8; break;
    case 76: *value = 9; break;
    default: return 1;
  }
  return ANSWER;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = 0; return ANSWER; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
  *free = (size_t)7 << 30;
  *total = (size_t)8 << 30;
  return 0;
}
