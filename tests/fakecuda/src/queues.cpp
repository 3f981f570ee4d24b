// Streams are FIFOs that threads run: waiting, delays, traces, and the watch for what hangs.
#include "runtime.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <random>
#include <set>
#include <thread>

namespace fakecuda {

struct Item {
  Stream* stream;
  const char* name;
  int kind;
  std::function<void()> run;
};

struct Queue {
  std::mutex lock;
  std::condition_variable news;
  std::deque<Item> items;
  bool started = false;
  std::mt19937_64 random;
  std::atomic<const char*> running{nullptr};
  std::atomic<int64_t> since_ns{0};
  int number = 0;
};

std::mutex& streams_lock() { static auto* m = new std::mutex; return *m; }
std::vector<Stream*>& streams() { static auto* m = new std::vector<Stream*>; return *m; }
std::vector<Queue*>& hardware_queues(int device) {
  static auto* m = new std::vector<Queue*>[MOST_DEVICES];
  return m[device];
}
Stream* legacy[MOST_DEVICES];

std::mutex& waits_lock() { static auto* m = new std::mutex; return *m; }
std::set<HostWait*>& waits() { static auto* m = new std::set<HostWait*>; return *m; }
HostWait::HostWait(const char* name) : what(name) {
  std::lock_guard<std::mutex> hold(waits_lock());
  waits().insert(this);
}
HostWait::~HostWait() {
  std::lock_guard<std::mutex> hold(waits_lock());
  waits().erase(this);
}

std::atomic<bool> leaving{false};
std::atomic<int> executing{0};
FILE* trace_file = nullptr;
std::mutex trace_lock;

void trace(Stream* s, const char* name, int kind, int64_t begin, int64_t end) {
  std::lock_guard<std::mutex> hold(trace_lock);
  if (!trace_file) {
    std::string path = std::string(settings().trace) + "." + std::to_string(getpid());
    trace_file = fopen(path.c_str(), "w");
  }
  if (trace_file)
    fprintf(trace_file, "%lld %lld %d %d %d %s\n", (long long)begin, (long long)end, s->device, s->number,
            kind, name);
}

static thread_local Queue* own_queue;

static void delay(int kind) {
  auto& set = settings();
  if (set.delay_us <= 0 || kind == RECORD || kind == WAIT || kind == GRAPH) return;
  std::uniform_real_distribution<double> unit(0, 1);
  if (unit(own_queue->random) < set.delay_share)
    std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(unit(own_queue->random) * set.delay_us));
}

void run_now(Stream* s, const char* name, int kind, const std::function<void()>& run) {
  own_queue->running = name;
  own_queue->since_ns = now_ns();
  delay(kind);
  int64_t begin = settings().trace ? now_ns() : 0;
  if (kind != GRAPH) executing++;  // a graph's work counts by itself
  if (leaving) {
    if (kind != GRAPH) executing--;
    while (true) pause();
  }
  if (!device_error[s->device] || kind == RECORD || kind == GRAPH) run();
  if (kind != GRAPH) executing--;
  if (settings().trace) trace(s, name, kind, begin, now_ns());
}

void run_queue(Queue* queue) {
  own_queue = queue;
  while (true) {
    Item item;
    {
      std::unique_lock<std::mutex> hold(queue->lock);
      queue->news.wait(hold, [&] { return !queue->items.empty(); });
      item = std::move(queue->items.front());
      queue->items.pop_front();
    }
    if (leaving) {
      while (true) pause();
    }
    run_now(item.stream, item.name, item.kind, item.run);
    item.run = nullptr;  // what it holds goes before anybody is told
    queue->running = nullptr;
    item.stream->completed.fetch_add(1);
    item.stream->completed.notify_all();
  }
}

void watch_for_hangs() {
  double limit_s = settings().hang_s;
  while (!leaving) {
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(limit_s / 2, 5.0)));
    bool stuck = false;
    std::lock_guard<std::mutex> hold(streams_lock());
    for (Stream* s : streams()) {
      const char* name = s->queue ? s->queue->running.load() : nullptr;
      stuck |= name && now_ns() - s->queue->since_ns > int64_t(limit_s * 1e9);
    }
    if (!stuck) continue;
    FILE* out = fakecuda_report();
    fprintf(out, "[fakecuda] pid %d: an item runs for more than %.0f s\n", getpid(), limit_s);
    for (Stream* s : streams()) {
      if (s->submitted == s->completed || !s->queue) continue;
      const char* name = s->queue->running.load();
      fprintf(out, "  device %d stream %d: %llu of %llu, %s for %.1f s, then", s->device, s->number,
              (unsigned long long)s->completed, (unsigned long long)s->submitted, name ? name : "nothing",
              name ? (now_ns() - s->queue->since_ns) / 1e9 : 0.0);
      std::lock_guard<std::mutex> inner(s->queue->lock);
      int shown = 0;
      for (auto& item : s->queue->items)
        if (shown++ < 6) fprintf(out, " %s;", item.name);
      fprintf(out, "\n");
    }
    {
      std::lock_guard<std::mutex> inner(waits_lock());
      for (HostWait* w : waits()) fprintf(out, "  a host thread waits in %s for %.1f s\n", w->what, (now_ns() - w->since_ns) / 1e9);
    }
    fflush(out);
  }
}

void leave() {  // as at a real process's end, nothing starts any more; what runs comes to its end
  leaving = true;
  for (int i = 0; i < 2000 && executing > 0; i++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  fakecuda_summary();
  if (trace_file) fflush(trace_file);
}

Queue* new_queue(int number) {
  auto* queue = new Queue;
  queue->number = number;
  queue->random.seed(settings().seed * 1000003 + number);
  return queue;
}

Stream* new_stream(int device, bool blocking, int priority, bool own) {
  auto* s = new Stream;
  s->device = device;
  s->blocking = blocking;
  s->priority = priority;
  std::lock_guard<std::mutex> hold(streams_lock());
  s->number = int(streams().size());
  if (own || !settings().connections) s->queue = new_queue(s->number);
  streams().push_back(s);
  return s;
}

Stream* stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
    static std::mutex lock;
    std::lock_guard<std::mutex> hold(lock);
    if (!legacy[current_device]) legacy[current_device] = new_stream(current_device, true, 0);
    return legacy[current_device];
  }
  return reinterpret_cast<Stream*>(handle);
}

Queue* queue_of(Stream* s) {  // where queues are few, streams get them in turn at their first use
  static std::mutex lock;
  std::lock_guard<std::mutex> hold(lock);
  if (s->queue) return s->queue;
  int connections = settings().connections;
  if (connections < 0) connections = int(fakecuda_env("CUDA_DEVICE_MAX_CONNECTIONS", 8));
  auto& queues = hardware_queues(s->device);
  static int given[MOST_DEVICES];
  while (int(queues.size()) < connections) queues.push_back(new_queue(int(queues.size()) + 100 * s->device));
  return s->queue = queues[size_t(given[s->device]++ % connections)];
}

void push(Stream* s, const char* name, int kind, std::function<void()> run) {
  Queue* queue = s->queue ? s->queue : queue_of(s);
  std::lock_guard<std::mutex> hold(queue->lock);
  if (!queue->started) {
    queue->started = true;
    static bool first = [] {
      atexit(leave);
      if (settings().hang_s > 0) std::thread(watch_for_hangs).detach();
      return true;
    }();
    (void)first;
    std::thread(run_queue, queue).detach();
  }
  s->submitted++;
  queue->items.push_back({s, name, kind, std::move(run)});
  queue->news.notify_one();
}

void wait_stream(Stream* s) {
  uint64_t target = s->submitted;
  uint64_t seen = s->completed;
  while (seen < target) {
    s->completed.wait(seen);
    seen = s->completed;
  }
}

std::shared_ptr<Done> mark(Stream* s, const char* name = "record") {
  auto done = std::make_shared<Done>();
  push(s, name, RECORD, [done] { done->set(); });
  return done;
}

void push_wait(Stream* s, std::shared_ptr<Done> done, const char* name) {
  if (done && !done->over) push(s, name, WAIT, [done] { done->wait(); });
}

void enqueue(Stream* s, const char* name, int kind, std::function<void()> run) {
  if (s->capture) return note_work(s, name, kind, std::move(run));
  if (s->blocking) {  // the rules of the legacy stream
    std::vector<Stream*> others;
    {
      std::lock_guard<std::mutex> hold(streams_lock());
      for (Stream* other : streams())
        if (other != s && other->device == s->device && other->blocking && other->submitted != other->completed &&
            (s == legacy[s->device] || other == legacy[s->device]))
          others.push_back(other);
    }
    for (Stream* other : others) push_wait(s, mark(other, "legacy"), "legacy");
  }
  push(s, name, kind, std::move(run));
}

void wait_device(int device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> hold(streams_lock());
    for (Stream* s : streams())
      if (s->device == device) all.push_back(s);
  }
  for (Stream* s : all) wait_stream(s);
}

}  // namespace fakecuda
