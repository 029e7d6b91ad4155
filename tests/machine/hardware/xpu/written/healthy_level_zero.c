/* An Arc A770. INIT is the body of zeInit, MINOR a part of the loader's version; with NONE, no device. */
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#ifndef INIT
#define INIT return 0;
#endif
#ifndef MINOR
#define MINOR 20
#endif

enum { WRONG_TYPE = 0x78000004 };
struct head { uint32_t type; struct head *next; };
struct driver { struct head head; uint8_t uuid[16]; uint32_t version; };
struct device {
  struct head head;
  uint32_t type, vendor, device, flags, subdevice, clock;
  uint64_t largest;
  uint32_t contexts, priority, threads, simd, units, subslices, slices;
  uint64_t resolution;
  uint32_t bits, kernel_bits;
  uint8_t uuid[16];
  char name[256];
};
struct memory { struct head head; uint32_t flags, clock, width; uint64_t size; char name[256]; };
struct pci { struct head head; uint32_t address[4]; int32_t generation, lanes; int64_t speed; };
struct usable { struct head head; uint64_t size; };
struct component { char name[64]; uint32_t spec; int version[3]; };

static char card;

int zeInit(uint32_t flags) { INIT }
int zelLoaderGetVersions(size_t *count, struct component *all) {
  if (all) {
    memset(all, 0, 2 * sizeof *all);
    strcpy(all[0].name, "tracing layer");
    strcpy(all[1].name, "loader");
    all[1].version[0] = 1, all[1].version[1] = MINOR, all[1].version[2] = 2;
  }
  *count = 2;
  return 0;
}
int zeDriverGet(uint32_t *count, void **all) {
  if (all) all[0] = &card;
  *count = 1;
  return 0;
}
int zeDriverGetApiVersion(void *driver, uint32_t *version) { *version = 1 << 16 | 6; return 0; }
int zeDriverGetProperties(void *driver, struct driver *about) {
  if (about->head.type != 0x1) return WRONG_TYPE;
  about->version = 0x01030000 + 32224;
  return 0;
}
int zeDeviceGet(void *driver, uint32_t *count, void **all) {
#ifdef NONE
  *count = 0;
#else
  if (all) all[0] = &card;
  *count = 1;
#endif
  return 0;
}
int zeDeviceGetProperties(void *which, struct device *about) {
  static const uint8_t uuid[16] = {0x86, 0x80, 0xa0, 0x56, 8, 0, 0, 0, 3};
  if (about->head.type != 0x3) return WRONG_TYPE;
  about->type = 1, about->vendor = 0x8086, about->device = 0x56a0;
  memcpy(about->uuid, uuid, sizeof uuid);
  strcpy(about->name, "Intel(R) Arc(TM) A770 Graphics");
  for (struct head *more = about->head.next; more; more = more->next)
    if (more->type == 0x20041) ((struct usable *)more)->size = 15032385536;
  return 0;
}
int zeDeviceGetMemoryProperties(void *which, uint32_t *count, struct memory *all) {
  if (all && all->head.type != 0x7) return WRONG_TYPE;
  if (all) all->size = 16225243136;
  *count = 1;
  return 0;
}
int zeDevicePciGetPropertiesExt(void *which, struct pci *place) {
  if (place->head.type != 0x10008) return WRONG_TYPE;
  place->address[1] = 3;
  return 0;
}
