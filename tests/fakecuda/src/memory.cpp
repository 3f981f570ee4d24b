// Device memory at addresses of its own, pinned memory, and the table that knows both.
#include "runtime.h"

#include <sys/mman.h>
#include <algorithm>
#include <cstring>

namespace fakecuda {

std::shared_mutex& memory_lock() { static auto* m = new std::shared_mutex; return *m; }
std::map<uintptr_t, Block>& blocks() { static auto* m = new std::map<uintptr_t, Block>; return *m; }

static std::atomic<uint64_t> used[MOST_DEVICES];

// The driver gives out pages of 2 MiB; small requests share one.
static uint64_t charged(uint64_t size) { return size >= (1 << 20) ? (size + (2 << 20) - 1) / (2 << 20) * (2 << 20) : size; }

bool charge(int device, uint64_t size) {
  uint64_t bytes = charged(size), before = used[device].fetch_add(bytes);
  if (before + bytes + settings().context <= settings().memory) return true;
  used[device] -= bytes;
  return false;
}

void discharge(int device, uint64_t size) { used[device] -= charged(size); }

// Ranges that were reserved and are given back, by device and size. Plain allocations never share an address.
static auto& returned_addresses() {
  static auto* found = new std::map<std::pair<int, size_t>, std::vector<uintptr_t>>;
  return *found;
}

void give_addresses(uintptr_t at, size_t size) { returned_addresses()[{int((at - DEVICE_BASE) / DEVICE_SPAN), size}].push_back(at); }

uintptr_t take_addresses(int device, size_t size) {
  static uintptr_t next_address[MOST_DEVICES];
  auto& again = returned_addresses()[{device, size}];
  if (!again.empty()) {
    uintptr_t at = again.back();
    again.pop_back();
    return at;
  }
  if (!next_address[device]) next_address[device] = DEVICE_BASE + device * DEVICE_SPAN;
  uintptr_t at = next_address[device];
  next_address[device] += (size + (2 << 20) - 1) / (2 << 20) * (2 << 20) + (2 << 20);  // a gap catches overruns
  if (next_address[device] > DEVICE_BASE + (device + 1) * DEVICE_SPAN) {
    fprintf(stderr, "[fakecuda] out of addresses\n");
    abort();
  }
  return at;
}

const Block* find_block(const void* ptr) {
  auto it = blocks().upper_bound(uintptr_t(ptr));
  if (it == blocks().begin()) return nullptr;
  --it;
  return uintptr_t(ptr) < it->second.start + it->second.size ? &it->second : nullptr;
}

Place place_of(const void* ptr) {
  std::shared_lock<std::shared_mutex> hold(memory_lock());
  const Block* block = find_block(ptr);
  if (!block) return {0, -1, SIZE_MAX};
  return {block->device >= 0 ? 1 : 2, block->device, block->start + block->size - uintptr_t(ptr)};
}

}  // namespace fakecuda

using namespace fakecuda;

extern "C" {

int fakecuda_find(const void* ptr, int* device, void** base, size_t* size) {
  std::shared_lock<std::shared_mutex> hold(memory_lock());
  const Block* block = find_block(ptr);
  if (!block) return 0;
  if (device) *device = block->device;
  if (base) *base = (void*)block->start;
  if (size) *size = block->size;
  return block->device >= 0 ? 1 : 2;
}

cudaError_t CUDARTAPI cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  use_context(current_device);
  *total = settings().memory;
  uint64_t gone = used[current_device] + settings().context;
  *free_bytes = gone < *total ? *total - gone : 0;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMalloc(void** out, size_t size) {
  if (auto error = unsafe_call()) return error;
  fakecuda_note("cudaMalloc", 1);
  use_context(current_device);
  size_t rounded = (std::max<size_t>(size, 1) + 511) / 512 * 512;
  if (!charge(current_device, rounded)) {
    fakecuda_note("cudaMalloc refused", 1);
    return say(cudaErrorMemoryAllocation);
  }
  std::unique_lock<std::shared_mutex> hold(memory_lock());
  uintptr_t at = take_addresses(current_device, rounded);
  void* found = mmap((void*)at, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (found != (void*)at) {
    perror("[fakecuda] mmap");
    discharge(current_device, rounded);
    return say(cudaErrorMemoryAllocation);
  }
  if (settings().poison && rounded <= (256u << 20)) memset(found, 0xff, rounded);
  blocks()[at] = {at, rounded, current_device, true};
  *out = found;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaFree(void* ptr) {
  if (!ptr) return cudaSuccess;
  if (auto error = unsafe_call()) return error;
  fakecuda_note("cudaFree", 1);
  Place place = place_of(ptr);
  if (place.what != 1) return say(cudaErrorInvalidValue);
  HostWait told("cudaFree");
  wait_device(place.device);  // as the real one
  std::unique_lock<std::shared_mutex> hold(memory_lock());
  auto it = blocks().find(uintptr_t(ptr));
  if (it == blocks().end()) return say(cudaErrorInvalidValue);
  size_t size = it->second.size;
  munmap(ptr, size);
  discharge(place.device, size);
  blocks().erase(it);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaHostAlloc(void** out, size_t size, unsigned) {
  if (auto error = unsafe_call()) return error;
  fakecuda_note("cudaHostAlloc", 1);
  size_t rounded = (std::max<size_t>(size, 1) + 4095) / 4096 * 4096;
  void* found = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return say(cudaErrorMemoryAllocation);
  std::unique_lock<std::shared_mutex> hold(memory_lock());
  blocks()[uintptr_t(found)] = {uintptr_t(found), rounded, -1, true};
  *out = found;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMallocHost(void** out, size_t size) { return cudaHostAlloc(out, size, 0); }
cudaError_t CUDARTAPI cudaFreeHost(void* ptr) {
  if (!ptr) return cudaSuccess;
  if (auto error = unsafe_call()) return error;
  for (int d = 0; d < int(visible().size()); d++) wait_device(d);
  std::unique_lock<std::shared_mutex> hold(memory_lock());
  auto it = blocks().find(uintptr_t(ptr));
  if (it == blocks().end() || it->second.device >= 0 || !it->second.mapped) return say(cudaErrorInvalidValue);
  munmap(ptr, it->second.size);
  blocks().erase(it);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaHostRegister(void* ptr, size_t size, unsigned) {
  fakecuda_note("cudaHostRegister", 1);
  if (!ptr || !size) return say(cudaErrorInvalidValue);
  std::unique_lock<std::shared_mutex> hold(memory_lock());
  auto it = blocks().lower_bound(uintptr_t(ptr));
  bool over = it != blocks().end() && it->first < uintptr_t(ptr) + size;
  if (over || find_block(ptr)) return say(cudaErrorHostMemoryAlreadyRegistered);
  blocks()[uintptr_t(ptr)] = {uintptr_t(ptr), size, -1, false};
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaHostUnregister(void* ptr) {
  std::unique_lock<std::shared_mutex> hold(memory_lock());
  auto it = blocks().find(uintptr_t(ptr));
  if (it == blocks().end() || it->second.device >= 0 || it->second.mapped) return say(cudaErrorHostMemoryNotRegistered);
  blocks().erase(it);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaPointerGetAttributes(cudaPointerAttributes* a, const void* ptr) {
  memset(a, 0, sizeof *a);
  Place place = place_of(ptr);
  a->device = place.what == 1 ? place.device : place.what == 2 ? current_device : -2;
  a->type = place.what == 1 ? cudaMemoryTypeDevice : place.what == 2 ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->devicePointer = place.what ? const_cast<void*>(ptr) : nullptr;
  a->hostPointer = place.what == 2 ? const_cast<void*>(ptr) : nullptr;
  return cudaSuccess;
}

}  // extern "C"
