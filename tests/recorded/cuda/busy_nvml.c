/* Follows healthy_nvml.c: what its two cards do. The first computes and has two processes, the
   second tells nothing but its temperature. With OLD defined, processes are listed in the second
   form only, and only those that compute; with QUIET defined, no process has computed lately; with SECRET, loads of processes
   are not told. CRASHES and HANGS are what the question for the load does. */
#include <unistd.h>

enum { INSUFFICIENT_SIZE = 7 };

typedef struct { uint32_t gpu, memory; } Rates;
typedef struct { uint32_t pid; uint64_t memory; uint32_t gpu_instance, compute_instance; } Process;
typedef struct { uint32_t pid; uint64_t time; uint32_t sm, memory, encoder, decoder; } Sample;

int nvmlDeviceGetUtilizationRates(Card *card, Rates *rates) {
#ifdef CRASHES
  *(volatile int *)0 = 1;
#endif
#ifdef HANGS
  for (;;) sleep(1000);
#endif
  if (card->number != 0) return NOT_SUPPORTED;
  rates->gpu = 78; rates->memory = 41;
  return SUCCESS;
}
int nvmlDeviceGetTemperature(Card *card, int sensor, unsigned *degrees) { *degrees = 62; return SUCCESS; }
int nvmlDeviceGetPowerUsage(Card *card, unsigned *milliwatts) {
  *milliwatts = 512500;
  return card->number == 0 ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetEnforcedPowerLimit(Card *card, unsigned *milliwatts) {
  *milliwatts = 700000;
  return card->number == 0 ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetFanSpeed(Card *card, unsigned *percent) { return NOT_SUPPORTED; }
int nvmlDeviceGetClockInfo(Card *card, int kind, unsigned *mhz) {
  *mhz = 1980;
  return card->number == 0 && kind == 1 ? SUCCESS : NOT_SUPPORTED;
}
static int list(Card *card, unsigned *count, Process *processes, int most) {
  static const Process known[] = {{4000001, 300}, {4000002, 900}};
  if (card->number != 0 || most == 0) { *count = 0; return SUCCESS; }
  if (processes == 0 || *count < (unsigned)most) { *count = most; return INSUFFICIENT_SIZE; }
  *count = most;
  for (int i = 0; i < most; i++) {
    processes[i] = known[i];
    processes[i].memory *= MIB;
  }
  return SUCCESS;
}
#ifdef OLD
int nvmlDeviceGetComputeRunningProcesses_v2(Card *card, unsigned *count, Process *processes) {
#else
int nvmlDeviceGetComputeRunningProcesses_v3(Card *card, unsigned *count, Process *processes) {
#endif
  return list(card, count, processes, 2);
}
#ifndef OLD /* the first one draws, too */
int nvmlDeviceGetGraphicsRunningProcesses_v3(Card *card, unsigned *count, Process *processes) {
  return list(card, count, processes, 1);
}
#endif
int nvmlDeviceGetProcessUtilization(Card *card, Sample *samples, unsigned *count, uint64_t since) {
#ifdef SECRET
  return NOT_SUPPORTED;
#endif
#ifdef QUIET
  return NOT_FOUND;
#endif
  if (samples == 0) { *count = 2; return INSUFFICIENT_SIZE; }
  memset(samples, 0, 2 * sizeof *samples);
  samples[0].pid = samples[1].pid = 4000002;
  samples[0].time = 2000; samples[0].sm = 77;
  samples[1].time = 1000; samples[1].sm = 5;
  *count = 2;
  return SUCCESS;
}
