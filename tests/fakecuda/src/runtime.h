// What the files of the emulated runtime (libcudart.so.13) share among themselves.
#pragma once
#include "fakecuda.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

namespace fakecuda {

// settings.cpp
uint64_t bytes_of(const char* name, uint64_t otherwise);  // "24GiB", "800MB", "1000000"
struct Settings {
  int devices = int(fakecuda_env("FAKECUDA_DEVICES", 2));
  uint64_t memory = bytes_of("FAKECUDA_MEMORY", 24ull << 30);
  uint64_t context = bytes_of("FAKECUDA_CONTEXT", 420ull << 20);  // what a real context takes
  double h2d = fakecuda_env("FAKECUDA_H2D_GBPS", 0), d2h = fakecuda_env("FAKECUDA_D2H_GBPS", 0);
  double delay_us = fakecuda_env("FAKECUDA_DELAY_US", 0);
  double delay_share = fakecuda_env("FAKECUDA_DELAY_SHARE", 0.3);  // of the items that are delayed
  double peer = fakecuda_env("FAKECUDA_PEER_GBPS", 0);
  uint64_t seed = uint64_t(fakecuda_env("FAKECUDA_SEED", 1));
  int connections = int(fakecuda_env("FAKECUDA_CONNECTIONS", 0));  // hardware queues; 0: one per stream; -1: by CUDA_DEVICE_MAX_CONNECTIONS
  bool move_bytes = fakecuda_env("FAKECUDA_NOCOPY", 0) == 0;
  bool p2p = fakecuda_env("FAKECUDA_P2P", 0) != 0;
  bool poison = fakecuda_env("FAKECUDA_POISON", 0) != 0;
  int lazy = int(fakecuda_env("FAKECUDA_LAZY", 0));  // CUDA_MODULE_LOADING=LAZY, as bad as it can be; 2: refused beside messages
  double sync_share = fakecuda_env("FAKECUDA_SYNC_SHARE", 0);  // of launches that first wait for the device, as a cudaFree in the allocator would
  bool strict = fakecuda_env("FAKECUDA_STRICT", 1) != 0;  // a kernel that nothing computes is an error
  int verbose = int(fakecuda_env("FAKECUDA_VERBOSE", 0));
  double hang_s = fakecuda_env("FAKECUDA_HANG_S", 0);
  const char* trace = getenv("FAKECUDA_TRACE");
  int major = int(fakecuda_env("FAKECUDA_SM", 89)) / 10, minor = int(fakecuda_env("FAKECUDA_SM", 89)) % 10;
};
Settings& settings();
std::vector<int>& visible();  // by CUDA_VISIBLE_DEVICES: the physical number of each device
int64_t now_ns();

// devices.cpp
constexpr int MOST_DEVICES = 16;
extern thread_local int current_device;
extern std::atomic<bool> has_context[MOST_DEVICES];
extern std::atomic<int> device_error[MOST_DEVICES];
cudaError_t say(cudaError_t error);  // remembers it for cudaGetLastError
cudaError_t health(int device);
void use_context(int device);

// memory.cpp
constexpr uintptr_t DEVICE_BASE = 0x100000000000ull, DEVICE_SPAN = 0x040000000000ull;  // 4 TiB of addresses each
struct Block {
  uintptr_t start;
  size_t size;
  int device;   // -1: host
  bool mapped;  // by us (cudaHostAlloc), not registered
};
struct Place {
  int what;  // 0 pageable, 1 device, 2 pinned
  int device;
  size_t left;  // bytes to the end of its block
};
std::shared_mutex& memory_lock();
std::map<uintptr_t, Block>& blocks();
const Block* find_block(const void* ptr);  // with the lock held
Place place_of(const void* ptr);
uintptr_t take_addresses(int device, size_t size);
void give_addresses(uintptr_t at, size_t size);  // with memory_lock() held, as taking
bool charge(int device, uint64_t size);  // false when the card has no room
void discharge(int device, uint64_t size);

// queues.cpp
struct Done {  // one recording of an event
  std::atomic<int> over{0};
  std::atomic<int64_t> time_ns{0};
  void set() {
    time_ns = now_ns();
    over = 1;
    over.notify_all();
  }
  void wait() { over.wait(0); }
};
struct Queue;  // what one thread runs
struct Stream {
  int device = 0, number = 0, priority = 0;
  bool blocking = true;  // waits for and is waited for by the legacy stream
  Queue* queue = nullptr;
  std::atomic<uint64_t> submitted{0}, completed{0};
  std::atomic<struct Capture*> capture{nullptr};  // the one it takes part in
};
struct HostWait {  // a thread of the program that waits for the device; shown when nothing moves
  const char* what;
  int64_t since_ns = now_ns();
  explicit HostWait(const char* name);
  ~HostWait();
};
Stream* new_stream(int device, bool blocking, int priority, bool own_queue = false);
Stream* stream_of(cudaStream_t handle);
void enqueue(Stream* s, const char* name, int kind, std::function<void()> run);  // by the rules of the legacy stream; a capturing stream notes it
void run_now(Stream* s, const char* name, int kind, const std::function<void()>& run);  // on a stream's thread
void push(Stream* s, const char* name, int kind, std::function<void()> run);
void push_wait(Stream* s, std::shared_ptr<Done> done, const char* name = "wait");
void wait_stream(Stream* s);
void wait_device(int device);

// graphs.cpp
struct Captured {  // where an event was recorded, in a capture
  uint64_t id = 0;
  size_t node = 0;
};
void note_work(Stream* s, const char* name, int kind, std::function<void()> run);  // of a stream that captures
Captured note_record(Stream* s);
cudaError_t note_wait(Stream* s, const Captured& event);  // the stream joins the event's capture
cudaError_t refuse_capture(Capture* capture, cudaError_t error);  // ends it
cudaError_t not_while_capturing(Stream* s);
cudaError_t unsafe_call();  // first in each call that a capture under way forbids

// kernels.cpp
void load_torch_part();

}  // namespace fakecuda
