// What the files of the torch extension (libfakecuda_torch.so) share.
//
// Real numbers: every aten operator that has a CUDA kernel gets another one, which allocates its results through the
// real CUDA caching allocator, and puts the CPU kernel, on CPU tensors over the same memory, on the current stream.
//
// What a queued computation holds are plain addresses, never tensors: memory goes back to the allocator exactly when it
// would on a GPU, and whoever uses it too early or too late reads wrong numbers.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <set>
#include <unordered_map>

#include "fakecuda.h"

namespace fakecuda {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// values.cpp
Tensor on_cpu(const Tensor& t);   // the same memory, held by nobody
Tensor on_meta(const Tensor& t);
Tensor dummy(const Tensor& t);    // zeros of the same shape on the CPU
IValue mapped(const IValue& value, const std::function<Tensor(const Tensor&)>& f);
void each(const IValue& value, const std::function<void(const Tensor&)>& f);
bool append_key(std::string& key, const IValue& value);  // false for what cannot be remembered
inline Tensor maybe(const IValue& v) { return v.isTensor() ? v.toTensor() : Tensor(); }
struct Shape {
  bool defined = false;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
};
Shape shape_of(const Tensor& t);

// substitutes.cpp, attention.cpp: operators computed otherwise than by their CPU kernel; on meta tensors for shapes alone
using Custom = std::function<void(Stack&)>;
std::unordered_map<std::string, Custom>& customs();
extern thread_local at::Generator* drawing;  // for those that draw
void add_substitutes();
void add_attention();

// operators.cpp
struct Seed {  // of what an operator draws; in a graph it is that of the launch, which torch puts into device memory
  at::PhiloxCudaState state;
  uint64_t now() const {
    uint64_t first = state.captured_ ? uint64_t(*state.seed_.ptr) : state.seed_.val;
    uint64_t offset = state.captured_ ? uint64_t(*state.offset_.ptr) + state.offset_intragraph_ : state.offset_.val;
    uint64_t x = first * 0x9E3779B97F4A7C15ull + offset * 0xBF58476D1CE4E5B9ull + 1;
    return (x ^ (x >> 31)) * 0x94D049BB133111EBull;
  }
};
struct Job {  // what lies in a stream's queue
  c10::OperatorHandle op;
  const Custom* custom;
  Stack args;
  std::vector<Tensor> results;  // CPU views of what was allocated
  std::vector<IValue> ready;    // instead of computing: copy these
  bool draws;
  Seed seed;
  int generator_at;
  int device;
  std::vector<bool> fresh;
};
void run_job(void* job);                           // as often as a graph is launched
void enqueue_job(std::unique_ptr<Job> job, cudaStream_t stream, const char* label);
c10::DispatchKeySet above();                       // what lies above the kernels: autograd, autocast, modes
int emulate_operators(torch::Library& library);    // how many

}  // namespace fakecuda
