// What is put in place when the extension is loaded: operators, copies, poison, statistics.
#include "torch_part.h"

#include <unistd.h>

namespace fakecuda {

const c10::OperatorHandle& copy_op() {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  return op;
}

Tensor& copy_here(Tensor& dst, const Tensor& src, bool non_blocking) {
  if (dst.is_same(src) || dst.numel() == 0) return dst;
  bool both = dst.is_cuda() && src.is_cuda();
  if (!both) return at::native::copy_(dst, src, non_blocking);
  bool plain = dst.scalar_type() == src.scalar_type() && dst.sizes() == src.sizes() && dst.is_conj() == src.is_conj() &&
               dst.is_neg() == src.is_neg() &&
               ((dst.is_contiguous() && src.is_contiguous()) ||
                (dst.strides() == src.strides() && dst.is_non_overlapping_and_dense()));
  if (plain) return at::native::copy_(dst, src, non_blocking);
  if (dst.device() != src.device()) {
    Tensor dense = src.to(dst.scalar_type()).expand_as(dst).contiguous();
    Tensor there = at::empty_like(dense, dense.options().device(dst.device()));
    at::native::copy_(there, dense, non_blocking);
    return dst.copy_(there);
  }
  c10::impl::ExcludeDispatchKeyGuard guard(above());
  c10::cuda::CUDAGuard device_guard(dst.device());
  auto stream = c10::cuda::getCurrentCUDAStream(dst.get_device());
  Tensor from = src.expand_as(dst);
  fakecuda_note("operators", 1);
  auto job = std::make_unique<Job>(Job{copy_op(), nullptr, {on_cpu(dst), on_cpu(from), false}, {}, {}, false, {}, -1, int(dst.get_device()), {false}});
  enqueue_job(std::move(job), stream.stream(), "aten::copy_");
  return dst;
}

int64_t choose_math(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) { return 0; }

void call(void* f) { (*(std::function<void()>*)f)(); }
void drop(void* f) { delete (std::function<void()>*)f; }

void print_stats() {  // what the real caching allocator has to say at the end
  try {
    for (int d = 0; d < c10::cuda::device_count(); d++) {
      auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(c10::DeviceIndex(d));
      if (!stats.reserved_bytes[0].peak) continue;
      FILE* file = fakecuda_report();
      fprintf(file, "[fakecuda] pid %d device %d: peak allocated %.1f MiB, peak reserved %.1f MiB, retries %lld, ooms %lld, cudaMalloc %lld\n", getpid(), d,
              stats.allocated_bytes[0].peak / 1048576.0, stats.reserved_bytes[0].peak / 1048576.0, (long long)stats.num_alloc_retries, (long long)stats.num_ooms, (long long)stats.num_device_alloc);
      fflush(file);
    }
  } catch (...) {
  }
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace fakecuda

extern "C" void fakecuda_set_up() {  // called once, by the runtime (kernels.cpp)
  using namespace fakecuda;
  static Silent silent;
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);  // that kernels are replaced is known
  at::globalContext().setUserEnabledCuDNN(false);
  add_substitutes();
  add_attention();
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, "fakecuda", 0);
  int count = emulate_operators(library);
  library.impl("copy_", copy_here);
  if (!strcmp(getenv("FAKECUDA_ATTENTION") ? getenv("FAKECUDA_ATTENTION") : "", "math")) library.impl("_fused_sdp_choice", choose_math);
  if (fakecuda_env("FAKECUDA_POISON", 0)) {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const c10::CachingDeviceAllocator::TraceEntry& e) {
      using Action = c10::CachingDeviceAllocator::TraceEntry::Action;
      if (e.action_ != Action::ALLOC && e.action_ != Action::FREE_COMPLETED) return;
      if (e.size_ > (64u << 20)) return;
      auto fill = [at = (void*)e.addr_, size = e.size_] { memset(at, 0xff, size); };
      auto* job = new std::function<void()>(fill);
      bool of_graph = e.mempool_.first || e.mempool_.second;  // else it comes and goes once, also during a capture
      if (of_graph) fakecuda_enqueue((cudaStream_t)e.stream_, "poison", call, job, POISON, drop);
      else fakecuda_run_beside((cudaStream_t)e.stream_, "poison", fill, POISON);
    });
  }
  if (fakecuda_env("FAKECUDA_VERBOSE", 0)) fakecuda_at_end(print_stats);
  if (fakecuda_env("FAKECUDA_VERBOSE", 0) > 1) fprintf(stderr, "[fakecuda] %d operators emulated\n", count);
}
