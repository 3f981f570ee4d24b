// The calls of the runtime for streams and events.
#include "runtime.h"

namespace fakecuda {

struct Event {
  std::mutex lock;
  std::shared_ptr<Done> done;
  Captured captured;  // where the last recording was, if a capture noted it
  bool timing = true;
  std::shared_ptr<Done> get() {
    std::lock_guard<std::mutex> hold(lock);
    return done;
  }
};

static cudaError_t refuse_event(cudaEvent_t event) {  // neither a captured event, nor any while a capture forbids it
  return reinterpret_cast<Event*>(event)->captured.id ? say(cudaErrorCapturedEvent) : unsafe_call();
}

}  // namespace fakecuda

using namespace fakecuda;

extern "C" {

cudaError_t CUDARTAPI cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  use_context(current_device);
  fakecuda_note("streams", 1);
  *out = reinterpret_cast<cudaStream_t>(new_stream(current_device, !(flags & cudaStreamNonBlocking), priority));
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
cudaError_t CUDARTAPI cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its work goes on; a handle is never given again
cudaError_t CUDARTAPI cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamQuery(cudaStream_t stream) {
  Stream* s = stream_of(stream);
  if (auto error = not_while_capturing(s)) return error;
  if (auto error = health(s->device)) return say(error);
  return s->completed == s->submitted ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t stream) {
  fakecuda_note("cudaStreamSynchronize", 1);
  Stream* s = stream_of(stream);
  if (auto error = not_while_capturing(s)) return error;
  HostWait told("cudaStreamSynchronize");
  wait_stream(s);
  return say(health(s->device));
}
cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (!event) return say(cudaErrorInvalidResourceHandle);
  auto* e = reinterpret_cast<Event*>(event);
  Stream* s = stream_of(stream);
  if (e->captured.id) return note_wait(s, e->captured);
  auto done = e->get();
  if (done && s->capture) return refuse_capture(s->capture, cudaErrorStreamCaptureIsolation);
  push_wait(s, done);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void* data) {
  enqueue(stream_of(stream), "hostfn", HOST_FN, [=] { fn(data); });
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t fn, void* data, unsigned) {
  enqueue(stream_of(stream), "callback", HOST_FN, [=] { fn(stream, cudaSuccess, data); });
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  auto* event = new Event;
  event->timing = !(flags & cudaEventDisableTiming);
  *out = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  if (!event) return say(cudaErrorInvalidResourceHandle);
  auto* e = reinterpret_cast<Event*>(event);
  Stream* s = stream_of(stream);
  if (s->capture) {
    e->captured = note_record(s);
    return cudaSuccess;
  }
  auto done = std::make_shared<Done>();
  {
    std::lock_guard<std::mutex> hold(e->lock);
    e->done = done;
    e->captured = {};
  }
  enqueue(s, "record", RECORD, [done] { done->set(); });
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t event) {
  if (auto error = refuse_event(event)) return error;
  auto done = reinterpret_cast<Event*>(event)->get();
  if (auto error = health(current_device)) return say(error);
  return !done || done->over ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t event) {
  if (auto error = refuse_event(event)) return error;
  auto done = reinterpret_cast<Event*>(event)->get();
  HostWait told("cudaEventSynchronize");
  if (done) done->wait();
  return say(health(current_device));
}
cudaError_t CUDARTAPI cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  auto *a = reinterpret_cast<Event*>(start), *b = reinterpret_cast<Event*>(end);
  auto from = a->get(), to = b->get();
  if (!from || !to || !a->timing || !b->timing) return say(cudaErrorInvalidResourceHandle);
  if (!from->over || !to->over) return cudaErrorNotReady;
  *ms = float((to->time_ns - from->time_ns) / 1e6);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return say(cudaErrorNotSupported); }
cudaError_t CUDARTAPI cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return say(cudaErrorNotSupported); }

}  // extern "C"
