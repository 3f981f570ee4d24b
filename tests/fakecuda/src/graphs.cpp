// CUDA graphs: a stream that captures notes down what it is given instead of doing it; a launch does all of it.
//
// Work keeps the stream it was given to: a graph has branches, the capturing stream's and one for each stream that
// joined, which wait for each other where events said so. What a capture forbids fails with CUDA's codes and ends it.
#include "runtime.h"

#include <algorithm>
#include <thread>

namespace fakecuda {

struct Node {
  int branch;
  const char* name;
  int kind;
  std::function<void()> run;
  size_t recorded;  // of a WAIT: the node it waits for
};
struct Graph {
  std::vector<Node> nodes;
  int branches = 1;
};
struct Launchable {  // what cudaGraphInstantiate makes
  std::shared_ptr<const Graph> graph;
  int device;
  std::vector<Stream*> sides;  // one for each branch but the first
  std::mutex lock;
  Stream* last_stream = nullptr;
  std::shared_ptr<Done> last;  // a graph never runs beside itself
};
using Seen = std::vector<size_t>;  // by branch: so many of the graph's nodes, as far as they lie in that branch

struct Capture {
  uint64_t id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  std::atomic<bool> valid{true};
  std::mutex lock;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::vector<Stream*> streams;           // by branch
  std::vector<Seen> seen;                 // by branch: what its next node comes after
  std::map<size_t, Seen> seen_at;         // the same, for each RECORD
  void add(int branch, const char* name, int kind, std::function<void()> run, size_t recorded = 0) {
    graph->nodes.push_back({branch, name, kind, std::move(run), recorded});
    seen[size_t(branch)][size_t(branch)] = graph->nodes.size();
  }
  int branch_of(Stream* s) { return int(std::find(streams.begin(), streams.end(), s) - streams.begin()); }
  void join(Stream* s) {
    streams.push_back(s);
    graph->branches = int(streams.size());
    for (Seen& each : seen) each.resize(streams.size());
    seen.emplace_back(streams.size());
    s->capture = this;
  }
};

static std::mutex& captures_lock() { static auto* m = new std::mutex; return *m; }
static std::vector<Capture*>& captures() { static auto* m = new std::vector<Capture*>; return *m; }  // under way
static std::atomic<int> under_way{0};
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

cudaError_t refuse_capture(Capture* capture, cudaError_t error) {
  capture->valid = false;
  return say(error);
}

cudaError_t unsafe_call() {
  if (!under_way || thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  std::lock_guard<std::mutex> hold(captures_lock());
  for (Capture* c : captures()) {
    bool own = c->thread == std::this_thread::get_id() && c->mode != cudaStreamCaptureModeRelaxed;
    bool others = thread_mode == cudaStreamCaptureModeGlobal && c->mode == cudaStreamCaptureModeGlobal;
    if (own || others) return refuse_capture(c, cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}

cudaError_t not_while_capturing(Stream* s) {
  Capture* capture = s->capture;
  return capture ? refuse_capture(capture, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

void note_work(Stream* s, const char* name, int kind, std::function<void()> run) {
  Capture* capture = s->capture;
  std::lock_guard<std::mutex> hold(capture->lock);
  if (capture->valid) capture->add(capture->branch_of(s), name, kind, std::move(run));
}

Captured note_record(Stream* s) {
  Capture* capture = s->capture;
  std::lock_guard<std::mutex> hold(capture->lock);
  int branch = capture->branch_of(s);
  if (capture->valid) capture->add(branch, "record", RECORD, nullptr);
  size_t node = capture->graph->nodes.size() - 1;
  capture->seen_at[node] = capture->seen[size_t(branch)];
  return {capture->id, node};
}

cudaError_t note_wait(Stream* s, const Captured& event) {
  std::lock_guard<std::mutex> all(captures_lock());
  Capture* of_event = nullptr;
  for (Capture* c : captures())
    if (c->id == event.id) of_event = c;
  Capture* capture = s->capture;
  if (!of_event) return capture ? refuse_capture(capture, cudaErrorStreamCaptureIsolation) : say(cudaErrorCapturedEvent);
  if (capture && capture != of_event) {
    of_event->valid = false;
    return refuse_capture(capture, cudaErrorStreamCaptureMerge);
  }
  std::lock_guard<std::mutex> hold(of_event->lock);
  if (!of_event->valid) return say(cudaErrorStreamCaptureInvalidated);
  if (!capture) of_event->join(s);
  int branch = of_event->branch_of(s);
  if (of_event->graph->nodes[event.node].branch != branch) of_event->add(branch, "wait", WAIT, nullptr, event.node);
  Seen& mine = of_event->seen[size_t(branch)];
  const Seen& then = of_event->seen_at[event.node];
  for (size_t b = 0; b < then.size(); b++) mine[b] = std::max(mine[b], then[b]);
  return cudaSuccess;
}

static void run_branch(const Graph& graph, int branch, const std::vector<std::shared_ptr<Done>>& recorded, Stream* s) {
  for (size_t i = 0; i < graph.nodes.size(); i++) {
    const Node& node = graph.nodes[i];
    if (node.branch != branch) continue;
    if (node.kind == RECORD) recorded[i]->set();
    else if (node.kind == WAIT) recorded[node.recorded]->wait();
    else run_now(s, node.name, node.kind, node.run);
  }
}

static cudaError_t launch_graph(Launchable* exec, Stream* s) {
  if (auto error = not_while_capturing(s)) return error;  // a graph within a graph
  if (s->device != exec->device) return say(cudaErrorInvalidValue);
  fakecuda_note("graph launches", 1);
  auto graph = exec->graph;
  std::vector<std::shared_ptr<Done>> recorded(graph->nodes.size());  // of this launch, by node
  for (size_t i = 0; i < recorded.size(); i++)
    if (graph->nodes[i].kind == RECORD) recorded[i] = std::make_shared<Done>();
  std::lock_guard<std::mutex> hold(exec->lock);
  if (exec->last_stream != s) push_wait(s, exec->last);
  if (!exec->sides.empty()) {
    auto begun = std::make_shared<Done>();
    enqueue(s, "graph begins", RECORD, [begun] { begun->set(); });
    for (size_t b = 0; b < exec->sides.size(); b++) {
      Stream* side = exec->sides[b];
      push_wait(side, begun);
      enqueue(side, "graph", GRAPH, [=] { run_branch(*graph, int(b) + 1, recorded, side); });
    }
  }
  auto done = std::make_shared<Done>();
  enqueue(s, "graph", GRAPH, [=] { run_branch(*graph, 0, recorded, s); });
  enqueue(s, "graph ends", RECORD, [done] { done->set(); });
  exec->last = done;
  exec->last_stream = s;
  return cudaSuccess;
}

}  // namespace fakecuda

using namespace fakecuda;

extern "C" {

cudaError_t CUDARTAPI cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  static std::atomic<uint64_t> next{1};
  Stream* s = stream_of(stream);
  if (s->number == stream_of(nullptr)->number) return say(cudaErrorStreamCaptureUnsupported);  // the legacy stream
  if (s->capture) return not_while_capturing(s);
  auto* capture = new Capture{next++, mode, std::this_thread::get_id()};
  std::lock_guard<std::mutex> hold(captures_lock());
  capture->join(s);
  captures().push_back(capture);
  under_way++;
  fakecuda_note("captures", 1);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  Stream* s = stream_of(stream);
  std::lock_guard<std::mutex> all(captures_lock());
  std::unique_ptr<Capture> capture(s->capture.load());
  if (!capture) return say(cudaErrorIllegalState);
  cudaError_t error = cudaSuccess;
  if (capture->streams[0] != s) error = cudaErrorStreamCaptureUnmatched;
  else if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) error = cudaErrorStreamCaptureWrongThread;
  if (error) {
    refuse_capture(capture.get(), error);
    capture.release();
    return error;
  }
  for (Stream* each : capture->streams) each->capture = nullptr;
  captures().erase(std::find(captures().begin(), captures().end(), capture.get()));
  under_way--;
  if (!capture->valid) return say(cudaErrorStreamCaptureInvalidated);
  for (size_t b = 0; b < capture->streams.size(); b++)
    if (capture->seen[0][b] < capture->seen[b][b]) return say(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<const Graph>(capture->graph));
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = nullptr;
  if (count) *count = 0;
  if (!under_way) return cudaSuccess;
  Capture* capture = stream_of(stream)->capture;
  if (!capture) return cudaSuccess;
  *status = capture->valid ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
  if (id) *id = capture->id;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
cudaError_t CUDARTAPI cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes) return say(cudaErrorNotSupported);
  *count = (*reinterpret_cast<std::shared_ptr<const Graph>*>(graph))->nodes.size();
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  auto* exec = new Launchable{*reinterpret_cast<std::shared_ptr<const Graph>*>(graph), current_device};
  for (int b = 1; b < exec->graph->branches; b++) exec->sides.push_back(new_stream(current_device, false, 0, true));
  *out = reinterpret_cast<cudaGraphExec_t>(exec);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return launch_graph(reinterpret_cast<Launchable*>(exec), stream_of(stream));
}
cudaError_t CUDARTAPI cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<std::shared_ptr<const Graph>*>(graph);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGraphExecDestroy(cudaGraphExec_t exec) {  // a launch under way goes on
  delete reinterpret_cast<Launchable*>(exec);
  return cudaSuccess;
}
// Graphs made by hand, and conditional ones.
cudaError_t CUDARTAPI cudaStreamBeginCaptureToGraph(cudaStream_t, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode) { return say(cudaErrorNotSupported); }
cudaError_t CUDARTAPI cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned) { return say(cudaErrorNotSupported); }
cudaError_t CUDARTAPI cudaGraphAddNode(cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, cudaGraphNodeParams*) { return say(cudaErrorNotSupported); }
cudaError_t CUDARTAPI cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t*) { return say(cudaErrorNotSupported); }
cudaError_t CUDARTAPI cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle*, cudaGraph_t, unsigned, unsigned) { return say(cudaErrorNotSupported); }
cudaError_t CUDARTAPI cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return say(cudaErrorNotSupported); }

}  // extern "C"
