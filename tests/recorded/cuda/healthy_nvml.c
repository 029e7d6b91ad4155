/* An NVML with two cards that answers every question asked of it. With SPLIT defined, the second
   card is in MIG mode and has two instances; with OLD defined, only the first form of the memory
   question is known, as before driver 510; with LOST defined, the first card is lost. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15 };

typedef struct { int number; int parent; const char *name, *uuid, *bus; uint64_t total; } Card;
typedef struct { uint64_t total, free, used; } Memory;
typedef struct { uint32_t version; uint64_t total, reserved, free, used; } Memory2;
typedef struct {
  char legacy[16];
  uint32_t domain, bus, device, pci_device, pci_subsystem;
  char bus_id[32];
} Pci;

static const uint64_t MIB = 1024 * 1024;
static Card cards[] = {
    {0, -1, "NVIDIA Test 100", "GPU-aaaaaaaa-0000-4000-8000-000000000001", "00000000:0A:00.0", 16384},
    {1, -1, "NVIDIA Test 100", "GPU-bbbbbbbb-0000-4000-8000-000000000002", "00000000:0B:00.0", 16384},
};
static Card parts[] = {
    {2, 1, "NVIDIA Test 100 MIG 1g.5gb", "MIG-cccccccc-0000-4000-8000-000000000003", "", 5120},
    {3, 1, "NVIDIA Test 100 MIG 1g.5gb", "MIG-dddddddd-0000-4000-8000-000000000004", "", 5120},
};
int inits = 0, shutdowns = 0;

int nvmlInitWithFlags(unsigned flags) { inits++; return SUCCESS; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { shutdowns++; return SUCCESS; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  snprintf(text, size, "580.10.01");
  return SUCCESS;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Card **card) {
#ifdef LOST
  if (index == 0) return GPU_IS_LOST;
#endif
  *card = &cards[index];
  return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Card **card) {
  for (int i = 0; i < 2; i++)
    if (strcmp(cards[i].uuid, uuid) == 0) { *card = &cards[i]; return SUCCESS; }
  return NOT_FOUND;
}
int nvmlDeviceGetName(Card *card, char *text, unsigned size) {
  snprintf(text, size, "%s", card->name);
  return SUCCESS;
}
int nvmlDeviceGetUUID(Card *card, char *text, unsigned size) {
  snprintf(text, size, "%s", card->uuid);
  return SUCCESS;
}
int nvmlDeviceGetPciInfo_v3(Card *card, Pci *pci) {
  memset(pci, 0, sizeof *pci);
  snprintf(pci->bus_id, sizeof pci->bus_id, "%s", card->bus);
  return SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(Card *card, int *major, int *minor) {
  *major = 9; *minor = 0;
  return SUCCESS;
}
int nvmlDeviceGetComputeMode(Card *card, unsigned *mode) { *mode = 0; return SUCCESS; }
int nvmlDeviceGetMemoryInfo(Card *card, Memory *memory) {
  memory->total = card->total * MIB;
  memory->used = 1024 * MIB;
  memory->free = memory->total - memory->used;
  return SUCCESS;
}
#ifndef OLD
int nvmlDeviceGetMemoryInfo_v2(Card *card, Memory2 *memory) {
  memory->total = card->total * MIB;
  memory->reserved = 256 * MIB;
  memory->used = 0;
  memory->free = memory->total - memory->reserved;
  return SUCCESS;
}
#endif
int nvmlDeviceGetMigMode(Card *card, unsigned *now, unsigned *pending) {
#ifdef SPLIT
  *now = *pending = card->number == 1;
  return SUCCESS;
#else
  return NOT_SUPPORTED;
#endif
}
int nvmlDeviceGetMaxMigDeviceCount(Card *card, unsigned *count) { *count = 7; return SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(Card *card, unsigned index, Card **part) {
  if (index > 1) return NOT_FOUND;
  *part = &parts[index];
  return SUCCESS;
}
int nvmlDeviceGetGpuInstanceId(Card *part, unsigned *id) { *id = part->number + 5; return SUCCESS; }
int nvmlDeviceGetComputeInstanceId(Card *part, unsigned *id) { *id = 0; return SUCCESS; }
int nvmlDeviceGetAttributes_v2(Card *part, uint32_t *attributes) {
  memset(attributes, 0, 16);
  attributes[0] = 14;
  return SUCCESS;
}
