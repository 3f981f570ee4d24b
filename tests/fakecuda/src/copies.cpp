// Copies: each moves its bytes when its turn comes, one at a time per device and direction where a rate is set.
#include "runtime.h"

#include <chrono>
#include <cstring>
#include <thread>

namespace fakecuda {

std::mutex& link_of(int device, int direction) {
  static auto* m = new std::mutex[MOST_DEVICES * 3];
  return m[device * 3 + direction];
}

void move(void* dst, const void* src, size_t size, int kind, int device) {
  auto& set = settings();
  double rate = kind == COPY_H2D ? set.h2d : kind == COPY_D2H ? set.d2h : kind == COPY_PEER ? set.peer : 0;
  if (rate <= 0) {
    if (set.move_bytes) memmove(dst, src, size);
    return;
  }
  std::lock_guard<std::mutex> hold(link_of(device, kind == COPY_H2D ? 0 : kind == COPY_D2H ? 1 : 2));
  int64_t begin = now_ns(), length = int64_t(size / rate) + 2000;  // GB/s are bytes per ns
  if (set.move_bytes) memmove(dst, src, size);
  while (true) {
    int64_t left = begin + length - now_ns();
    if (left <= 0) return;
    if (left > 100000) std::this_thread::sleep_for(std::chrono::nanoseconds(left - 60000));
  }
}

const char* KIND_NAMES[] = {"kernel", "h2d", "d2h", "d2d", "peer", "memset", "hostfn", "record", "wait", "message", "poison"};

cudaError_t copy_async(void* dst, const void* src, size_t size, cudaStream_t handle, bool blocking_call) {
  if (!size) return cudaSuccess;
  Stream* s = stream_of(handle);
  use_context(s->device);
  Place to = place_of(dst), from = place_of(src);
  if (to.left < size || from.left < size) {
    fprintf(stderr, "[fakecuda] a copy of %zu bytes leaves its allocation\n", size);
    return say(cudaErrorInvalidValue);
  }
  if (uintptr_t(dst) - DEVICE_BASE < MOST_DEVICES * DEVICE_SPAN && to.what != 1) return say(cudaErrorInvalidValue);
  if (uintptr_t(src) - DEVICE_BASE < MOST_DEVICES * DEVICE_SPAN && from.what != 1) return say(cudaErrorInvalidValue);
  int kind = to.what == 1 ? (from.what == 1 ? (to.device == from.device ? COPY_D2D : COPY_PEER) : COPY_H2D) : COPY_D2H;
  bool pageable = to.what == 0 || from.what == 0;
  if (pageable || blocking_call) {
    if (auto error = not_while_capturing(s)) return error;
  }
  if (blocking_call) {
    if (auto error = unsafe_call()) return error;
  }
  if (pageable && !blocking_call) fakecuda_note("copies of pageable memory called async", 1);
  fakecuda_note(KIND_NAMES[kind], 1);
  fakecuda_note((std::string(KIND_NAMES[kind]) + " bytes").c_str(), (long long)size);
  int device = kind == COPY_H2D ? to.device : from.device >= 0 ? from.device : s->device;
  enqueue(s, KIND_NAMES[kind], kind, [=] {
    if (place_of(dst).what != to.what || place_of(src).what != from.what) {
      fakecuda_fail(s->device, "a copy whose memory was freed or unregistered before it ran");
      return;
    }
    move(dst, src, size, kind, device);
  });
  if (pageable || blocking_call) {
    wait_stream(s);
    return say(health(s->device));
  }
  return cudaSuccess;
}

}  // namespace fakecuda

using namespace fakecuda;

extern "C" {

cudaError_t CUDARTAPI cudaMemcpyAsync(void* dst, const void* src, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return copy_async(dst, src, size, stream, false);
}
cudaError_t CUDARTAPI cudaMemcpy(void* dst, const void* src, size_t size, cudaMemcpyKind) {
  fakecuda_note("cudaMemcpy", 1);
  return copy_async(dst, src, size, nullptr, true);
}
cudaError_t CUDARTAPI cudaMemcpyPeerAsync(void* dst, int, const void* src, int, size_t size, cudaStream_t stream) {
  return copy_async(dst, src, size, stream, false);
}
cudaError_t CUDARTAPI cudaMemcpy2DAsync(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++)
    if (auto error = copy_async((char*)dst + row * dpitch, (const char*)src + row * spitch, width, stream, false)) return error;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemsetAsync(void* ptr, int value, size_t size, cudaStream_t stream) {
  if (!size) return cudaSuccess;
  Place place = place_of(ptr);
  if (place.what == 0 || place.left < size) return say(cudaErrorInvalidValue);
  fakecuda_note("memset", 1);
  enqueue(stream_of(stream), "memset", MEMSET, [=] { if (settings().move_bytes) memset(ptr, value, size); });
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemset(void* ptr, int value, size_t size) {
  if (auto error = cudaMemsetAsync(ptr, value, size, nullptr)) return error;
  return cudaStreamSynchronize(nullptr);
}

}  // extern "C"
