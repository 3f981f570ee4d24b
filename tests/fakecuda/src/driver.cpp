// The driver calls that torch uses: contexts, and virtual memory for expandable segments. libraries.py adds the rest.
#include "runtime.h"

#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>

using namespace fakecuda;

extern "C" {

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
  *text = error ? "fakecuda driver error" : "no error";
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuDriverGetVersion(int* version) { *version = 13000; return CUDA_SUCCESS; }
CUresult CUDAAPI cuDeviceGet(CUdevice* out, int number) { *out = number; return CUDA_SUCCESS; }
CUresult CUDAAPI cuDeviceGetCount(int* count) { *count = int(visible().size()); return CUDA_SUCCESS; }
CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) { *value = 1; return CUDA_SUCCESS; }
  return CUresult(cudaDeviceGetAttribute(value, cudaDeviceAttr(attribute), device));
}
CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = has_context[device];
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  use_context(device);
  *context = reinterpret_cast<CUcontext>(uintptr_t(device) + 1);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
  *context = has_context[current_device] ? reinterpret_cast<CUcontext>(uintptr_t(current_device) + 1) : nullptr;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
  if (context) current_device = int(uintptr_t(context)) - 1;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr ptr) {
  Place place = place_of((void*)ptr);
  if (!place.what) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(unsigned*)data = place.what == 1 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int*)data = place.device;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr ptr) {
  void* start;
  int device;
  if (fakecuda_find((void*)ptr, &device, &start, size) != 1) return CUDA_ERROR_INVALID_VALUE;
  *base = (CUdeviceptr)start;
  return CUDA_SUCCESS;
}
// Virtual memory management, for expandable segments.
struct Physical { int device; size_t size; };
CUresult CUDAAPI cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *out = 2 << 20;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* out, size_t size, size_t, CUdeviceptr, unsigned long long) {
  std::unique_lock<std::shared_mutex> hold(memory_lock());
  uintptr_t at = take_addresses(current_device, size);
  if (mmap((void*)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0) != (void*)at) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = at;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemAddressFree(CUdeviceptr at, size_t size) {
  std::unique_lock<std::shared_mutex> hold(memory_lock());
  munmap((void*)at, size);
  give_addresses(at, size);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* out, size_t size, const CUmemAllocationProp* prop, unsigned long long) {
  int device = prop->location.id;
  fakecuda_note("cuMemCreate", 1);
  if (!charge(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = (CUmemGenericAllocationHandle) new Physical{device, size};
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  auto* p = (Physical*)handle;
  discharge(p->device, p->size);
  delete p;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemMap(CUdeviceptr at, size_t size, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  mprotect((void*)at, size, PROT_READ | PROT_WRITE);
  std::unique_lock<std::shared_mutex> hold(memory_lock());
  // Neighbours grow together, so that a copy may span them.
  int device = ((Physical*)handle)->device;
  uintptr_t start = at, end = at + size;
  auto it = blocks().upper_bound(start);
  if (it != blocks().begin()) {
    auto before = std::prev(it);
    if (before->second.start + before->second.size == start && before->second.device == device) {
      start = before->second.start;
      blocks().erase(before);
    }
  }
  auto behind = blocks().find(end);
  if (behind != blocks().end() && behind->second.device == device) {
    end += behind->second.size;
    blocks().erase(behind);
  }
  blocks()[start] = {start, end - start, device, true};
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemUnmap(CUdeviceptr at, size_t size) {
  std::unique_lock<std::shared_mutex> hold(memory_lock());
  const Block* found = find_block((void*)at);
  if (found) {
    Block whole = *found;
    blocks().erase(whole.start);
    if (whole.start < at) blocks()[whole.start] = {whole.start, at - whole.start, whole.device, true};
    if (at + size < whole.start + whole.size) blocks()[at + size] = {at + size, whole.start + whole.size - at - size, whole.device, true};
  }
  madvise((void*)at, size, MADV_DONTNEED);
  mprotect((void*)at, size, PROT_NONE);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(const char* symbol, void** out, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  static void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
  *out = driver ? dlsym(driver, (std::string(symbol) + "_v2").c_str()) : nullptr;
  if (!*out && driver) *out = dlsym(driver, symbol);
  if (status) *status = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *out ? cudaSuccess : cudaErrorSymbolNotFound;
}

}  // extern "C"
