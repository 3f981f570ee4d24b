// Kernels: registered by name and launched by name only. What computes instead is loaded here (operators.cpp).
#include "runtime.h"

#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>

namespace fakecuda {

std::mutex& functions_lock() { static auto* m = new std::mutex; return *m; }
std::unordered_map<const void*, const char*>& functions() {
  static auto* m = new std::unordered_map<const void*, const char*>;
  return *m;
}

cudaError_t launch(const void* function, cudaStream_t handle, void** args) {
  Stream* s = stream_of(handle);
  use_context(s->device);
  const char* name = "kernel";
  {
    std::lock_guard<std::mutex> hold(functions_lock());
    auto it = functions().find(function);
    if (it != functions().end()) name = it->second;
  }
  if (strstr(name, "spin_kernel") && args) {  // torch.cuda._sleep(cycles), at 2.5 GHz
    long cycles = *(long*)args[0];
    enqueue(s, "sleep", KERNEL, [cycles] { std::this_thread::sleep_for(std::chrono::nanoseconds(long(cycles / 2.5))); });
    return cudaSuccess;
  }
  fakecuda_note((std::string("REAL KERNEL NOT RUN ") + name).c_str(), 1);
  static std::set<std::string>* told = new std::set<std::string>;
  {
    std::lock_guard<std::mutex> hold(functions_lock());
    if (told->insert(name).second) fprintf(stderr, "[fakecuda] a kernel that nothing computes: %.200s\n", name);
  }
  bool strict = settings().strict;
  int device = s->device;
  enqueue(s, name, KERNEL, [=] { if (strict) fakecuda_fail(device, name); });
  return cudaSuccess;
}

std::atomic<bool> torch_loaded{false};
void load_torch_part() {  // the computing part, once libtorch is there: any process that asks for devices gets it
  if (torch_loaded.exchange(true)) return;
  const char* path = getenv("FAKECUDA_TORCH");
  if (!path || !*path) return;
  void* cpu = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  if (!cpu) {
    torch_loaded = false;
    return;
  }
  void* part = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  auto set_up = part ? (void (*)())dlsym(part, "fakecuda_set_up") : nullptr;
  if (set_up) set_up();
  else fprintf(stderr, "[fakecuda] %s\n", dlerror());
}

std::atomic<int>& messages_under_way(int device) {
  static std::atomic<int> counts[MOST_DEVICES];
  return counts[device];
}

void first_launch(int device, const char* name) {  // lazy loading at its worst: waits for all queued work
  static std::mutex lock;
  static auto* seen = new std::set<std::pair<int, std::string>>;
  {
    std::lock_guard<std::mutex> hold(lock);
    if (!seen->insert({device, name}).second) return;
  }
  fakecuda_note("first launches", 1);
  if (int count = messages_under_way(device)) {
    fakecuda_note("first launches beside a message", 1);
    if (settings().lazy > 1) {
      std::string text = std::string(name) + " is launched for the first time beside " + std::to_string(count) + " messages";
      fakecuda_fail(device, text.c_str());
      return;
    }
  }
  HostWait told("a first launch");
  wait_device(device);
}

}  // namespace fakecuda

using namespace fakecuda;

extern "C" {

void fakecuda_run_beside(cudaStream_t stream, const char* name, std::function<void()> run, int kind) {
  push(stream_of(stream), name, kind, std::move(run));
}
void fakecuda_enqueue(cudaStream_t stream, const char* name, void (*fn)(void*), void* arg, int kind, void (*drop)(void*)) {
  Stream* s = stream_of(stream);
  use_context(s->device);
  if (s->capture) {
    if (kind == MESSAGE) {  // nothing here launches NCCL's from a graph
      not_while_capturing(s);
      return;
    }
    std::shared_ptr<void> held(arg, [drop](void* p) { if (drop) drop(p); });
    return note_work(s, name, kind, [fn, held] { fn(held.get()); });
  }
  if (settings().lazy && kind == KERNEL) first_launch(s->device, name);
  if (settings().sync_share > 0 && kind == KERNEL) {
    static thread_local std::mt19937_64 random(settings().seed * 7919 + uint64_t(getpid()));
    if (std::uniform_real_distribution<double>(0, 1)(random) < settings().sync_share) {
      fakecuda_note("forced device waits", 1);
      HostWait told("a forced device wait");
      wait_device(s->device);
    }
  }
  if (kind != MESSAGE)
    return enqueue(s, name, kind, [=] {
      fn(arg);
      if (drop) drop(arg);
    });
  messages_under_way(s->device)++;
  enqueue(s, name, kind, [=] {
    fn(arg);
    messages_under_way(s->device)--;
  });
}
int fakecuda_messages(int device) { return messages_under_way(device); }
int fakecuda_stream_device(cudaStream_t stream) { return stream_of(stream)->device; }

void** CUDARTAPI __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void CUDARTAPI __cudaRegisterFatBinaryEnd(void**) {}
void CUDARTAPI __cudaUnregisterFatBinary(void**) {}
char CUDARTAPI __cudaInitModule(void**) { return 1; }
void CUDARTAPI __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  std::lock_guard<std::mutex> hold(functions_lock());
  functions()[host] = name;
}
void CUDARTAPI __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
struct Configuration { dim3 grid, block; size_t shared; void* stream; };
static thread_local std::vector<Configuration> pending;
unsigned CUDARTAPI __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pending.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t CUDARTAPI __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Configuration c = pending.empty() ? Configuration{} : pending.back();
  if (!pending.empty()) pending.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared = c.shared;
  *(void**)stream = c.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** args, size_t, cudaStream_t stream) { return launch((const void*)kernel, stream, args); }
cudaError_t CUDARTAPI cudaLaunchKernel(const void* function, dim3, dim3, void** args, size_t, cudaStream_t stream) { return launch(function, stream, args); }
cudaError_t CUDARTAPI cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** args) { return launch(function, config->stream, args); }
cudaError_t CUDARTAPI cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** args, size_t, cudaStream_t stream) { return launch(function, stream, args); }
cudaError_t CUDARTAPI cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  for (int built : {75, 80, 86, 90, 100, 120})  // those of torch's wheel: CUB finds its tuning by this version
    if (built <= 10 * settings().major + settings().minor || built == 75) a->binaryVersion = a->ptxVersion = built;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) { *count = 1; return cudaSuccess; }
cudaError_t CUDARTAPI cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) { *count = 1; return cudaSuccess; }

}  // extern "C"
