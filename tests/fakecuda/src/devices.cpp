// Devices, their properties, and errors.
#include "runtime.h"

#include <cstring>

namespace fakecuda {

std::atomic<bool> has_context[MOST_DEVICES];
std::atomic<int> device_error[MOST_DEVICES];
thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;

cudaError_t say(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

void use_context(int device) { has_context[device] = true; }

cudaError_t health(int device) { return cudaError_t(device_error[device].load()); }

}  // namespace fakecuda

using namespace fakecuda;

extern "C" {

void fakecuda_fail(int device, const char* what) {
  fprintf(stderr, "[fakecuda] device %d fails: %s\n", device, what);
  device_error[device] = cudaErrorLaunchFailure;
}

cudaError_t CUDARTAPI cudaGetDeviceCount(int* count) {
  load_torch_part();
  *count = int(visible().size());
  return *count ? cudaSuccess : say(cudaErrorNoDevice);
}
cudaError_t CUDARTAPI cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaSetDevice(int device) {
  if (device < 0 || device >= int(visible().size())) return say(cudaErrorInvalidDevice);
  current_device = device;
  use_context(device);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= int(visible().size())) return say(cudaErrorInvalidDevice);
  auto& set = settings();
  memset(p, 0, sizeof *p);
  const char* name = getenv("FAKECUDA_NAME");
  snprintf(p->name, sizeof p->name, "%s", name && *name ? name : "NVIDIA GeForce RTX 4090");
  snprintf(p->uuid.bytes, sizeof p->uuid.bytes, "fakecuda%d", visible()[device]);
  p->totalGlobalMem = set.memory;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = set.major;
  p->minor = set.minor;
  p->textureAlignment = 512;
  p->texturePitchAlignment = 32;
  p->multiProcessorCount = int(fakecuda_env("FAKECUDA_SMS", 128));
  p->canMapHostMemory = 1;
  p->concurrentKernels = 1;
  p->pciBusID = 1 + visible()[device];
  p->pciDeviceID = 0;
  p->asyncEngineCount = 2;
  p->unifiedAddressing = 1;
  p->memoryBusWidth = 384;
  p->l2CacheSize = 75497472;
  p->persistingL2CacheMaxSize = 51904512;
  p->maxThreadsPerMultiProcessor = 1536;
  p->streamPrioritiesSupported = 1;
  p->sharedMemPerMultiprocessor = 102400;
  p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1;
  p->concurrentManagedAccess = 1;
  p->computePreemptionSupported = 1;
  p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = 101376;
  p->maxBlocksPerMultiProcessor = 24;
  p->reservedSharedMemPerBlock = 1024;
  p->hostRegisterSupported = 1;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (auto error = cudaGetDeviceProperties(&p, device)) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 101376; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 102400; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 1536; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrPciBusId: *value = p.pciBusID; break;
    case cudaDevAttrClockRate: *value = 2520000; break;
    case cudaDevAttrMemoryClockRate: *value = 10501000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 384; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrHostRegisterSupported: *value = 1; break;
    case cudaDevAttrCanUseHostPointerForRegisteredMem: *value = 1; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxBlockDimX: *value = 1024; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, size_t(length), "0000:%02x:00.0", 1 + visible()[device]);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = settings().p2p && device != peer;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceEnablePeerAccess(int, unsigned) {
  return settings().p2p ? cudaSuccess : say(cudaErrorPeerAccessUnsupported);
}
cudaError_t CUDARTAPI cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceSynchronize() {
  if (auto error = unsafe_call()) return error;
  fakecuda_note("cudaDeviceSynchronize", 1);
  HostWait told("cudaDeviceSynchronize");
  wait_device(current_device);
  return say(health(current_device));
}
cudaError_t CUDARTAPI cudaRuntimeGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t CUDARTAPI cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t CUDARTAPI cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error ? error : health(current_device);
}
cudaError_t CUDARTAPI cudaPeekAtLastError() { return last_error ? last_error : health(current_device); }
const char* CUDARTAPI cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorLaunchFailure: return "unspecified launch failure (fakecuda: see above)";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorPeerAccessUnsupported: return "peer access is not supported between these two devices";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureMerge: return "operation would result in a merge of separate capture sequences";
    case cudaErrorStreamCaptureUnmatched: return "capture was not ended in the same stream as it began";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureWrongThread: return "attempt to terminate a thread-local capture sequence from another thread";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorIllegalState: return "the operation cannot be performed in the present state";
    default: return "fakecuda error";
  }
}
const char* CUDARTAPI cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : cudaGetErrorString(error);
}

}  // extern "C"
