// NCCL between processes (and threads) of one machine. Ranks meet in a file under /dev/shm; bytes are read straight out
// of the peer's memory (process_vm_readv), when the turn of the operation comes on its stream. A send ends when the
// receiver has taken it (rendezvous: real NCCL may end small sends sooner, never later), a collective when all have.
//
// A communicator connects to a peer when an operation first needs it: to send and to receive, for each direction, and for
// small and for large collectives, each at its first use. The caller then waits until the peers do so too, and the
// buffers of that connection are taken on the device. An operation holds blocks (SMs) from its turn to its end.
#include "fakecuda.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <algorithm>
#include <climits>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

typedef enum { ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage, ncclRemoteError, ncclInProgress } ncclResult_t;
typedef struct { char internal[128]; } ncclUniqueId;

namespace {

constexpr uint32_t RING = 1024;
using Word = std::atomic<uint32_t>;

void wake(Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
void sleep_on(Word& word, uint32_t value) {
  timespec most{0, 50000000};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
}

struct Post { int pid; uint64_t address, bytes; uint32_t what; };
struct Pair { Word posted, taken, ends[2]; Post ring[RING]; };  // ends: whether the sender, the receiver has connected
struct Seat { Word attached, device, arrived, done, connected[2]; Post post; };  // connected: for small, for large collectives
struct Shared { Word attached; Seat seats[64]; };

struct Comm {
  int rank, size, device;
  Shared* shared;
  Pair* pairs;  // [source * size + destination]
  std::string path;
  std::atomic<bool> aborted{false};
  uint32_t turn = 0;                                  // collectives so far
  std::vector<uint32_t> sent, received;               // per peer
  std::mutex lock;
  std::condition_variable news;
  uint64_t next = 0, serving = 0;                     // operations of one communicator keep their order on all streams
  std::vector<void*> buffers;
  int most_blocks = INT_MAX;
  Pair& pair(int from, int to) { return pairs[from * size + to]; }
};

struct Op { Comm* comm; cudaStream_t stream; int what; const void* in; void* out; size_t count; int type, reduction, peer; };
enum What { SEND, RECV, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL };
const char* NAMES[] = {"nccl send", "nccl recv", "nccl all_reduce", "nccl reduce", "nccl broadcast", "nccl all_gather", "nccl reduce_scatter", "nccl all_to_all"};
size_t width(int type) { static const size_t w[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; return w[type]; }

thread_local int depth = 0;
thread_local std::vector<Op> grouped;
thread_local std::string last_error = "no error";

bool wait_for(Comm* comm, Word& word, uint32_t least) {
  while (true) {
    uint32_t value = word;
    if (int32_t(value - least) >= 0) return true;
    if (comm->aborted) return false;
    sleep_on(word, value);
  }
}

void read_peer(const Post& post, uint64_t offset, void* into, size_t bytes) {
  static double rate = fakecuda_env("FAKECUDA_PEER_GBPS", 0);
  auto begin = std::chrono::steady_clock::now();
  static bool skip = fakecuda_env("FAKECUDA_NOCOPY", 0) != 0;
  if (skip) bytes = 0;
  if (post.pid == getpid()) {
    memmove(into, (void*)(post.address + offset), bytes);
  } else {
    for (size_t at = 0; at < bytes;) {
      iovec mine{(char*)into + at, bytes - at}, theirs{(char*)(post.address + offset) + at, bytes - at};
      ssize_t got = process_vm_readv(post.pid, &mine, 1, &theirs, 1, 0);
      if (got <= 0) {
        perror("[fakecuda] process_vm_readv");
        return;
      }
      at += size_t(got);
    }
  }
  if (rate > 0) std::this_thread::sleep_until(begin + std::chrono::nanoseconds(int64_t(bytes / rate)));
}

float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023, bits;
  if (exponent == 0) {
    float f = float(fraction) / 16777216.0f;
    return sign ? -f : f;
  }
  bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (fraction << 13);
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
uint16_t float_to_half(float f) {
  _Float16 h = _Float16(f);
  uint16_t bits;
  memcpy(&bits, &h, 2);
  return bits;
}
float bf16_to_float(uint16_t b) {
  uint32_t bits = uint32_t(b) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
uint16_t float_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 64);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T> T join(T a, T b, int op) { return op == 1 ? a * b : op == 2 ? std::max(a, b) : op == 3 ? std::min(a, b) : a + b; }
template <class T, class A> void reduce_as(const std::vector<std::vector<char>>& parts, char* out, size_t count, int op, A (*get)(T), T (*put)(A)) {
  for (size_t i = 0; i < count; i++) {
    A sum = get(((const T*)parts[0].data())[i]);
    for (size_t r = 1; r < parts.size(); r++) sum = join<A>(sum, get(((const T*)parts[r].data())[i]), op);
    if (op == 4) sum = A(sum / A(parts.size()));
    ((T*)out)[i] = put(sum);
  }
}
template <class T> T same(T x) { return x; }
void reduce(const std::vector<std::vector<char>>& parts, char* out, size_t count, int type, int op) {
  switch (type) {
    case 0: return reduce_as<int8_t, int8_t>(parts, out, count, op, same, same);
    case 1: return reduce_as<uint8_t, uint8_t>(parts, out, count, op, same, same);
    case 2: return reduce_as<int32_t, int32_t>(parts, out, count, op, same, same);
    case 3: return reduce_as<uint32_t, uint32_t>(parts, out, count, op, same, same);
    case 4: return reduce_as<int64_t, int64_t>(parts, out, count, op, same, same);
    case 5: return reduce_as<uint64_t, uint64_t>(parts, out, count, op, same, same);
    case 6: return reduce_as<uint16_t, float>(parts, out, count, op, half_to_float, float_to_half);
    case 7: return reduce_as<float, float>(parts, out, count, op, same, same);
    case 8: return reduce_as<double, double>(parts, out, count, op, same, same);
    case 9: return reduce_as<uint16_t, float>(parts, out, count, op, bf16_to_float, float_to_bf16);
  }
}

constexpr size_t SMALL_BYTES = 65536;  // up to here a collective takes the algorithm for small ones
int channels(Comm* comm) { return std::min(comm->most_blocks, int(fakecuda_env("FAKECUDA_NCCL_CHANNELS", 2))); }

using Others = std::vector<std::pair<Comm*, Word*>>;

// Connects for these operations what is not connected yet, and says for which other ends the caller must wait.
ncclResult_t connect(Comm* comm, const std::vector<Op>& ops, Others& others) {
  size_t megabytes = 0;  // of a direction NCCL's receiver has 10 MiB a channel, its sender 2 (transport/p2p.cc)
  for (const Op& op : ops) {
    bool message = op.what == SEND || op.what == RECV, large = op.count * width(op.type) > SMALL_BYTES;
    if (message ? op.peer == comm->rank : comm->size == 1) continue;
    Pair* pair = !message ? nullptr : op.what == SEND ? &comm->pair(comm->rank, op.peer) : &comm->pair(op.peer, comm->rank);
    Word& own = message ? pair->ends[op.what == RECV] : comm->shared->seats[comm->rank].connected[large];
    if (own) continue;
    own = 1;
    wake(own);
    if (message) others.push_back({comm, &pair->ends[op.what == SEND]});
    else for (int r = 0; r < comm->size; r++) others.push_back({comm, &comm->shared->seats[r].connected[large]});
    if (!message && comm->size == 2 && comm->shared->seats[comm->rank].connected[!large]) continue;  // a tree of two is a ring
    megabytes += size_t(channels(comm)) * (op.what == SEND ? 2 : op.what == RECV ? 10 : 12);
    fakecuda_note("nccl connections", message ? 1 : 2);
  }
  if (!megabytes) return ncclSuccess;
  int count = fakecuda_messages(comm->device);
  if (count && fakecuda_env("FAKECUDA_LAZY", 0) > 1) {
    char text[120];
    snprintf(text, sizeof text, "%s connects beside %d messages", NAMES[ops[0].what], count);
    fakecuda_fail(comm->device, text);
  }
  if (fakecuda_env("FAKECUDA_NCCL_BUFFERS", 0) != 0) {
    void* buffer;
    if (cudaMalloc(&buffer, megabytes << 20)) return ncclUnhandledCudaError;
    comm->buffers.push_back(buffer);
  }
  fakecuda_note("nccl connection MiB", (long long)megabytes);
  return ncclSuccess;
}

// The SMs that the operations under way on a device hold, while they compute or wait.
struct Blocks {
  int device, count;
  static std::atomic<int>& held(int device) { static std::atomic<int> each[64]; return each[device]; }
  Blocks(int device, int count) : device(device), count(count) {
    static std::atomic<int> most{0};
    int now = held(device) += count, sms = int(fakecuda_env("FAKECUDA_SMS", 0));
    for (int before = most; now > before;)
      if (most.compare_exchange_weak(before, now)) fakecuda_note("nccl blocks at once", now - before);
    if (sms && now >= sms) {
      char text[120];
      snprintf(text, sizeof text, "operations of NCCL hold %d of %d SMs: nothing else can run", now, sms);
      fakecuda_fail(device, text);
    }
  }
  ~Blocks() { held(device) -= count; }
};

struct Batch { Comm* comm; uint64_t ticket; std::vector<Op> ops; std::vector<uint32_t> turns; };

bool run_collective(const Op& op, uint32_t turn) {
  Comm* comm = op.comm;
  Shared* shared = comm->shared;
  const size_t n = size_t(comm->size), bytes = op.count * width(op.type);
  Seat& mine = shared->seats[comm->rank];
  mine.post = {getpid(), uint64_t(op.in), bytes, uint32_t(op.what)};
  mine.arrived = turn;
  wake(mine.arrived);
  for (size_t r = 0; r < n; r++) {
    if (!wait_for(comm, shared->seats[r].arrived, turn)) return false;
    const Post& post = shared->seats[r].post;
    if (shared->seats[r].arrived == turn && (post.what != uint32_t(op.what) || (post.bytes != bytes && op.what != BROADCAST))) {
      char text[200];
      snprintf(text, sizeof text, "NCCL ranks %d and %zu meet in different collectives: %s of %zu, %s of %zu bytes", comm->rank, r, NAMES[op.what], bytes, NAMES[post.what], size_t(post.bytes));
      fakecuda_fail(comm->device, text);
      return false;
    }
  }
  std::vector<char> result;
  auto take = [&](size_t r, size_t offset, size_t length) {
    std::vector<char> part(length);
    read_peer(shared->seats[r].post, offset, part.data(), length);
    return part;
  };
  std::vector<std::vector<char>> parts;
  size_t rank = size_t(comm->rank);
  switch (op.what) {
    case ALL_REDUCE:
    case REDUCE:
      if (op.what == REDUCE && comm->rank != op.peer) break;
      for (size_t r = 0; r < n; r++) parts.push_back(take(r, 0, bytes));
      result.resize(bytes);
      reduce(parts, result.data(), op.count, op.type, op.reduction);
      break;
    case REDUCE_SCATTER:
      for (size_t r = 0; r < n; r++) parts.push_back(take(r, rank * bytes, bytes));
      result.resize(bytes);
      reduce(parts, result.data(), op.count, op.type, op.reduction);
      break;
    case ALL_GATHER:
      for (size_t r = 0; r < n; r++) {
        auto part = take(r, 0, bytes);
        result.insert(result.end(), part.begin(), part.end());
      }
      break;
    case ALL_TO_ALL:
      for (size_t r = 0; r < n; r++) {
        auto part = take(r, rank * bytes, bytes);
        result.insert(result.end(), part.begin(), part.end());
      }
      break;
    case BROADCAST: result = take(size_t(op.peer), 0, bytes); break;
  }
  mine.done = turn;
  wake(mine.done);
  for (size_t r = 0; r < n; r++)
    if (!wait_for(comm, shared->seats[r].done, turn)) return false;
  if (result.size()) memcpy(op.out, result.data(), result.size());
  return true;
}

bool run_messages(const std::vector<const Op*>& ops) {
  std::vector<std::pair<Word*, uint32_t>> ends;
  for (const Op* op : ops)
    if (op->what == SEND) {
      Comm* comm = op->comm;
      Pair& pair = comm->pair(comm->rank, op->peer);
      uint32_t number = comm->sent[size_t(op->peer)]++;
      if (number >= RING && !wait_for(comm, pair.taken, number - RING + 1)) return false;
      pair.ring[number % RING] = {getpid(), uint64_t(op->in), op->count * width(op->type), uint32_t(op->type)};
      pair.posted = number + 1;
      wake(pair.posted);
      ends.push_back({&pair.taken, number + 1});
    }
  for (const Op* op : ops)
    if (op->what == RECV) {
      Comm* comm = op->comm;
      Pair& pair = comm->pair(op->peer, comm->rank);
      uint32_t number = comm->received[size_t(op->peer)]++;
      if (!wait_for(comm, pair.posted, number + 1)) return false;
      Post post = pair.ring[number % RING];
      size_t bytes = op->count * width(op->type);
      if (post.bytes != bytes) {
        char text[160];
        snprintf(text, sizeof text, "NCCL rank %d receives %zu bytes where %d sends %zu", comm->rank, bytes, op->peer, size_t(post.bytes));
        fakecuda_fail(comm->device, text);
        bytes = std::min(bytes, size_t(post.bytes));
      }
      read_peer(post, 0, op->out, bytes);
      pair.taken = number + 1;
      wake(pair.taken);
    }
  for (auto& [word, least] : ends)
    if (!wait_for(ops[0]->comm, *word, least)) return false;
  return true;
}

void run_batch(void* raw) {
  std::unique_ptr<Batch> batch((Batch*)raw);
  Comm* comm = batch->comm;
  {
    std::unique_lock<std::mutex> hold(comm->lock);
    comm->news.wait(hold, [&] { return comm->serving == batch->ticket || comm->aborted; });
  }
  Blocks blocks(comm->device, channels(comm));
  std::vector<const Op*> messages;
  bool fine = !comm->aborted;
  size_t turn = 0;
  for (const Op& op : batch->ops) {
    if (op.what == SEND || op.what == RECV) messages.push_back(&op);
    else if (fine) fine = run_collective(op, batch->turns[turn++]);
  }
  if (fine && messages.size()) run_messages(messages);
  std::lock_guard<std::mutex> hold(comm->lock);
  comm->serving++;
  comm->news.notify_all();
}

ncclResult_t submit(const std::vector<Op>& all) {
  std::vector<std::pair<std::pair<Comm*, cudaStream_t>, std::vector<Op>>> batches;
  for (const Op& op : all) {
    auto key = std::make_pair(op.comm, op.stream);
    auto it = std::find_if(batches.begin(), batches.end(), [&](auto& b) { return b.first == key; });
    if (it == batches.end()) batches.push_back({key, {op}});
    else it->second.push_back(op);
  }
  Others others;
  for (auto& [key, ops] : batches)
    if (auto bad = connect(key.first, ops, others)) return bad;
  for (auto& [comm, other] : others)
    if (!wait_for(comm, *other, 1)) return ncclInternalError;
  for (auto& [key, ops] : batches) {
    auto* batch = new Batch{key.first, 0, ops, {}};
    std::lock_guard<std::mutex> hold(key.first->lock);
    batch->ticket = key.first->next++;
    for (const Op& op : ops) {
      if (op.what != SEND && op.what != RECV) batch->turns.push_back(++key.first->turn);
      fakecuda_note(NAMES[op.what], 1);
      fakecuda_note((std::string(NAMES[op.what]) + " bytes").c_str(), (long long)(op.count * width(op.type)));
    }
    int before;
    cudaGetDevice(&before);
    cudaSetDevice(key.first->device);  // a group may be of several devices; the default stream is that of the current one
    fakecuda_enqueue(key.second, NAMES[ops[0].what], run_batch, batch, MESSAGE, nullptr);
    cudaSetDevice(before);
  }
  return ncclSuccess;
}

ncclResult_t check(const void* pointer, const Op& op, const char* what) {
  int device = -1;
  if (op.count && fakecuda_find(pointer, &device, nullptr, nullptr) != 1) {
    last_error = std::string(what) + ": not device memory";
    fprintf(stderr, "[fakecuda] %s: %s\n", NAMES[op.what], last_error.c_str());
    return ncclInvalidArgument;
  }
  return ncclSuccess;
}

ncclResult_t add(Op op) {
  if (op.what != RECV)
    if (auto bad = check(op.in, op, "send buffer")) return bad;
  if (op.what != SEND && !(op.what == REDUCE && op.comm->rank != op.peer))
    if (auto bad = check(op.out, op, "receive buffer")) return bad;
  if (op.comm->aborted) return ncclInvalidUsage;
  if (!depth) return submit({op});
  grouped.push_back(op);
  return ncclSuccess;
}

ncclResult_t attach(Comm** out, int size, const std::string& path, int rank, int device, bool wait) {
  size_t bytes = sizeof(Shared) + sizeof(Pair) * size_t(size) * size_t(size);
  int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, off_t(bytes))) return ncclSystemError;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return ncclSystemError;
  auto* comm = new Comm;
  comm->rank = rank;
  comm->size = size;
  comm->device = device;
  comm->shared = (Shared*)memory;
  comm->pairs = (Pair*)((char*)memory + sizeof(Shared));
  comm->path = path;
  comm->sent.resize(size_t(size));
  comm->received.resize(size_t(size));
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, device);
  comm->shared->seats[rank].device = uint32_t(properties.pciBusID);
  comm->shared->seats[rank].attached = 1;
  comm->shared->attached++;
  wake(comm->shared->attached);
  *out = comm;
  if (!wait) return ncclSuccess;
  auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(int(fakecuda_env("FAKECUDA_NCCL_TIMEOUT_S", 300)));
  while (comm->shared->attached < uint32_t(size)) {
    sleep_on(comm->shared->attached, comm->shared->attached);
    if (std::chrono::steady_clock::now() > patience) {
      last_error = "not all ranks came";
      return ncclSystemError;
    }
  }
  for (int r = 0; r < size; r++)
    if (r != rank && comm->shared->seats[r].device == comm->shared->seats[rank].device) {
      last_error = "Duplicate GPU detected: rank " + std::to_string(rank) + " and rank " + std::to_string(r);
      fprintf(stderr, "[fakecuda] %s\n", last_error.c_str());
      return ncclInvalidUsage;
    }
  unlink(path.c_str());
  static double megabytes = fakecuda_env("FAKECUDA_NCCL_MB", 0);  // what a communicator takes on the device
  void* own;
  if (megabytes > 0 && cudaMalloc(&own, size_t(megabytes * 1048576))) return ncclUnhandledCudaError;
  if (megabytes > 0) comm->buffers.push_back(own);
  fakecuda_note("nccl communicators", 1);
  return ncclSuccess;
}

}  // namespace

extern "C" {
ncclResult_t ncclGetVersion(int* version) { *version = 22902; return ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t result) { return result == ncclSuccess ? "no error" : result == ncclInvalidUsage ? "invalid usage" : "fakecuda nccl error"; }
const char* ncclGetLastError(void*) { return last_error.c_str(); }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/dev/shm/fakenccl-%d-%08x%08x", getpid(), random(), random());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(void** comm, int size, ncclUniqueId id, int rank, void* config) {
  int device;
  cudaGetDevice(&device);
  auto result = attach((Comm**)comm, size, id.internal, rank, device, true);
  int most = config ? ((int*)config)[7] : INT_MIN;  // maxCTAs
  if (result == ncclSuccess && most != INT_MIN) ((Comm*)*comm)->most_blocks = most;
  return result;
}
ncclResult_t ncclCommInitRank(void** comm, int size, ncclUniqueId id, int rank) { return ncclCommInitRankConfig(comm, size, id, rank, nullptr); }
ncclResult_t ncclCommInitAll(void** comms, int count, const int* devices) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  for (int i = 0; i < count; i++)
    if (auto bad = attach((Comm**)&comms[i], count, id.internal, i, devices ? devices[i] : i, false)) return bad;
  unlink(id.internal);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankScalable(void** comm, int size, int rank, int, ncclUniqueId* ids, void* config) { return ncclCommInitRankConfig(comm, size, ids[0], rank, config); }
ncclResult_t ncclCommFinalize(void*) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(void* comm) {
  auto* c = (Comm*)comm;
  for (void* buffer : c->buffers) cudaFree(buffer);
  c->buffers.clear();
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(void* comm) {
  auto* c = (Comm*)comm;
  c->aborted = true;
  std::lock_guard<std::mutex> hold(c->lock);
  c->news.notify_all();
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(void*, ncclResult_t* error) { *error = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclCommCount(void* comm, int* count) { *count = ((Comm*)comm)->size; return ncclSuccess; }
ncclResult_t ncclCommCuDevice(void* comm, int* device) { *device = ((Comm*)comm)->device; return ncclSuccess; }
ncclResult_t ncclCommUserRank(void* comm, int* rank) { *rank = ((Comm*)comm)->rank; return ncclSuccess; }
ncclResult_t ncclGroupStart() { depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd() {
  if (--depth == 0 && grouped.size()) {
    auto all = std::move(grouped);
    grouped.clear();
    return submit(all);
  }
  return ncclSuccess;
}
ncclResult_t ncclSend(const void* in, size_t count, int type, int peer, void* comm, cudaStream_t stream) { return add({(Comm*)comm, stream, SEND, in, nullptr, count, type, 0, peer}); }
ncclResult_t ncclRecv(void* out, size_t count, int type, int peer, void* comm, cudaStream_t stream) { return add({(Comm*)comm, stream, RECV, nullptr, out, count, type, 0, peer}); }
ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, int type, int op, void* comm, cudaStream_t stream) { return add({(Comm*)comm, stream, ALL_REDUCE, in, out, count, type, op, 0}); }
ncclResult_t ncclReduce(const void* in, void* out, size_t count, int type, int op, int root, void* comm, cudaStream_t stream) { return add({(Comm*)comm, stream, REDUCE, in, out, count, type, op, root}); }
ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, int type, int root, void* comm, cudaStream_t stream) { return add({(Comm*)comm, stream, BROADCAST, in ? in : out, out, count, type, 0, root}); }
ncclResult_t ncclBcast(void* inout, size_t count, int type, int root, void* comm, cudaStream_t stream) { return ncclBroadcast(inout, inout, count, type, root, comm, stream); }
ncclResult_t ncclAllGather(const void* in, void* out, size_t count, int type, void* comm, cudaStream_t stream) { return add({(Comm*)comm, stream, ALL_GATHER, in, out, count, type, 0, 0}); }
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, void* comm, cudaStream_t stream) { return add({(Comm*)comm, stream, REDUCE_SCATTER, in, out, count, type, op, 0}); }
ncclResult_t ncclAlltoAll(const void* in, void* out, size_t count, int type, void* comm, cudaStream_t stream) { return add({(Comm*)comm, stream, ALL_TO_ALL, in, out, count, type, 0, 0}); }
ncclResult_t ncclMemAlloc(void** out, size_t size) { return cudaMalloc(out, size) ? ncclUnhandledCudaError : ncclSuccess; }
ncclResult_t ncclMemFree(void* ptr) { return cudaFree(ptr) ? ncclUnhandledCudaError : ncclSuccess; }
ncclResult_t ncclCommSplit(void*, int, int, void**, void*) { return ncclInvalidUsage; }
ncclResult_t ncclCommRegister(void*, void*, size_t, void** handle) { *handle = (void*)1; return ncclSuccess; }
}
