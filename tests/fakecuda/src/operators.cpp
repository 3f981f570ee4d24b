// The kernel that stands for every operator's CUDA kernel.
#include "torch_part.h"

#include <ATen/Parallel.h>
#include <omp.h>
#include <unistd.h>

struct cublasContext;
namespace at::cuda {
TORCH_CUDA_CPP_API cublasContext* getCurrentCUDABlasHandle(bool);
}

namespace fakecuda {

static const bool compute = fakecuda_env("FAKECUDA_COMPUTE", 1) != 0;
static const bool say_ops = fakecuda_env("FAKECUDA_OPS", 0) != 0;

// Untouched: they launch nothing, or go through the runtime's copies.
static const std::set<std::string> KEEP = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::as_strided", "aten::view", "aten::view.dtype",
    "aten::_reshape_alias", "aten::unfold", "aten::resize_", "aten::_pin_memory", "aten::is_pinned",
    "aten::record_stream", "aten::_local_scalar_dense", "aten::is_set_to", "aten::_efficientzerotensor",
    "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::set_",
    "aten::set_.source_Tensor_storage_offset", "aten::_has_same_storage_numel", "aten::set_data",
    "aten::_nested_tensor_from_mask", "aten::_cudnn_init_dropout_state", "aten::copy_", "aten::_fused_sdp_choice"};
// Without a CUDA kernel of their own, but they would choose a library.
static const std::set<std::string> EXTRA = {"aten::convolution", "aten::convolution_backward", "aten::convolution_overrideable"};
// Sizes depend on values.
static const std::set<std::string> DATA_DEPENDENT = {
    "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out", "aten::_unique2",
    "aten::_unique", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
    "aten::repeat_interleave.Tensor", "aten::bincount", "aten::histc", "aten::_ctc_loss", "aten::multinomial",
    "aten::equal", "aten::_embedding_bag", "aten::_linalg_check_errors", "aten::linalg_ldl_factor_ex"};
static const std::set<std::string> MAY_MIX_DEVICES = {
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_", "aten::index_put_", "aten::_fused_adam_",
    "aten::_unsafe_index.Tensor", "aten::_fused_adamw_"};
static const std::set<std::string> PRODUCTS = {
    "aten::mm", "aten::mm.out", "aten::addmm", "aten::addmm.out", "aten::addmm_", "aten::bmm", "aten::bmm.out",
    "aten::baddbmm", "aten::baddbmm.out", "aten::addmv.out", "aten::addmv", "aten::dot", "aten::_addmm_activation"};

c10::DispatchKeySet above() {
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
         c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PreDispatch});
}

void lone_thread() {  // queued computations take one core each, as many things run at once
  static thread_local bool set = [] {
    at::get_num_threads();
    omp_set_num_threads(1);
    return true;
  }();
  (void)set;
}

void run_cpu(const c10::OperatorHandle& op, const Custom* custom, Stack& stack) {
  custom ? (*custom)(stack) : op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

void run_job(void* raw) {
  const auto* job = (const Job*)raw;
  lone_thread();
  c10::impl::ExcludeDispatchKeyGuard guard(above());
  try {
    Stack stack = job->args;
    if (job->ready.empty()) {
      at::Generator generator;
      if (job->draws) {
        generator = at::detail::createCPUGenerator(job->seed.now());
        if (job->generator_at >= 0) stack[size_t(job->generator_at)] = generator;
        drawing = &generator;
      }
      run_cpu(job->op, job->custom, stack);
      drawing = nullptr;
    } else {
      stack = job->ready;
    }
    size_t at = 0;
    for (size_t i = 0; i < stack.size(); i++) {
      if (!job->fresh[i]) continue;
      auto take = [&](const Tensor& found) {
        Tensor into = job->results.at(at++);
        if (!into.defined() || !found.defined()) return;
        TORCH_CHECK(found.defined() && found.sizes() == into.sizes(), "fakecuda: another shape than foreseen: ", found.defined() ? found.sizes() : at::IntArrayRef(), " for ", into.sizes(), found.defined());
        into.copy_(found);
      };
      if (stack[i].isTensor()) take(stack[i].toTensor());
      else if (stack[i].isTensorList())
        for (const Tensor& t : stack[i].toTensorVector()) take(t);
    }
  } catch (const std::exception& error) {
    drawing = nullptr;
    fakecuda_fail(job->device, (toString(job->op.operator_name()) + ": " + error.what()).c_str());
  }
}

void pass_time(void*) {  // instead of computing
  static const double us = fakecuda_env("FAKECUDA_KERNEL_US", 0);
  if (us > 0) usleep(useconds_t(us));
}

void enqueue_job(std::unique_ptr<Job> job, cudaStream_t stream, const char* label) {
  if (compute) fakecuda_enqueue(stream, label, run_job, job.release(), KERNEL, [](void* p) { delete (Job*)p; });
  else fakecuda_enqueue(stream, label, pass_time, nullptr, KERNEL, nullptr);
}

struct Result {  // of one return of the schema
  bool is_list = false;
  IValue plain;  // what is neither
  std::vector<Shape> shapes;
};
struct Shapes {
  std::vector<Result> results;
  std::vector<std::vector<std::vector<int64_t>>> out_sizes;  // per out= argument and tensor in it
};

class Emulated : public c10::OperatorKernel {
 public:
  explicit Emulated(const c10::OperatorHandle& op) : name_(toString(op.operator_name())) {
    auto it = customs().find(name_);
    custom_ = it == customs().end() ? nullptr : &it->second;
    draws_ = op.hasTag(at::Tag::nondeterministic_seeded);
    label_ = strdup(name_.c_str());
    const auto& schema = op.schema();
    for (size_t i = 0; i < schema.returns().size(); i++) {
      const auto* alias = schema.returns()[i].alias_info();
      int source = -1;
      if (alias)
        for (size_t j = 0; j < schema.arguments().size(); j++) {
          const auto* other = schema.arguments()[j].alias_info();
          if (other && other->isWrite() && other->beforeSets() == alias->beforeSets()) source = int(j);
        }
      source_.push_back(source);
      any_fresh_ |= source < 0;
    }
    for (size_t j = 0; j < schema.arguments().size(); j++) {
      const auto& a = schema.arguments()[j];
      if (a.is_out()) outs_.push_back(j);
      if (a.name() == "dropout_p") dropout_at_ = int(j);
      if (a.type()->str().find("Generator") != std::string::npos) generator_at_ = int(j);
    }
    draws_ |= generator_at_ >= 0;
    dependent_ = DATA_DEPENDENT.count(name_);
    may_mix_ = MAY_MIX_DEVICES.count(name_);
    product_ = PRODUCTS.count(name_);
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    if (say_ops) fprintf(stderr, "[fakecuda] %s\n", name_.c_str());
    const size_t count = op.schema().arguments().size();
    c10::impl::ExcludeDispatchKeyGuard guard(above());
    std::vector<IValue> args(stack->end() - long(count), stack->end());
    int device = find_device(args);
    c10::cuda::CUDAGuard device_guard{c10::DeviceIndex(device)};
    auto stream = c10::cuda::getCurrentCUDAStream(c10::DeviceIndex(device));
    fakecuda_note("operators", 1);
    TORCH_CHECK(custom_ || op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "fakecuda: no CPU kernel for ", name_);
    if (product_) at::cuda::getCurrentCUDABlasHandle(true);  // takes its workspace from the caching allocator

    auto job = std::make_unique<Job>(Job{op, custom_, {}, {}, {}, draws_, {}, generator_at_, device, {}});
    for (int source : source_) job->fresh.push_back(source < 0);
    if (dropout_at_ >= 0 && args[size_t(dropout_at_)].toDouble() == 0) job->draws = false;  // then CUDA draws nothing
    if (job->draws) draw(args, device, job->seed);

    Stack found;  // what goes back to the caller
    if (dependent_ || masks(args)) {
      c10::cuda::CUDAStream(stream).synchronize();
      Stack cpu = cpu_args(args);
      at::Generator generator;
      if (job->draws) {
        generator = at::detail::createCPUGenerator(job->seed.now());
        if (generator_at_ >= 0) cpu[size_t(generator_at_)] = generator;
        drawing = &generator;
      }
      if (outs_.size()) {  // they would be resized: as if functional
        for (size_t j : outs_) cpu[j] = mapped(args[j], [](const Tensor& t) { return at::empty({0}, at::TensorOptions().dtype(t.dtype()).device(at::kCPU)); });
      }
      run_cpu(op, custom_, cpu);
      drawing = nullptr;
      for (size_t i = 0; i < cpu.size(); i++) {
        if (source_[i] >= 0 && outs_.size() && cpu[i].isTensor()) {
          Tensor out = args[size_t(source_[i])].toTensor();
          at::native::resize_output(out, cpu[i].toTensor().sizes());
          job->fresh[i] = true;
          job->results.push_back(on_cpu(out));
          found.push_back(out);
        } else if (source_[i] >= 0) {
          found.push_back(args[size_t(source_[i])]);
        } else {
          found.push_back(mapped(cpu[i], [&](const Tensor& t) {
            Tensor out = empty(shape_of(t), device);
            job->results.push_back(on_cpu(out));
            return out;
          }));
        }
      }
      job->ready.assign(cpu.begin(), cpu.end());
    } else {
      if (any_fresh_ || outs_.size()) {
        const Shapes shapes = infer(op, args);
        for (size_t k = 0; k < outs_.size(); k++) {
          size_t at = 0;
          each(args[outs_[k]], [&](const Tensor& t) {
            Tensor out = t;
            const auto& sizes = shapes.out_sizes[k].at(at++);
            if (out.sizes() != at::IntArrayRef(sizes)) at::native::resize_output(out, sizes);
          });
        }
        for (size_t i = 0; i < source_.size(); i++) {
          if (source_[i] >= 0) {
            found.push_back(args[size_t(source_[i])]);
            continue;
          }
          const Result& result = shapes.results[i];
          auto make = [&](const Shape& shape) {
            if (!shape.defined) {
              job->results.push_back(Tensor());
              return Tensor();
            }
            Tensor out = empty(shape, device);
            job->results.push_back(on_cpu(out));
            return out;
          };
          if (result.is_list) {
            c10::List<Tensor> list;
            for (const Shape& shape : result.shapes) list.push_back(make(shape));
            found.push_back(list);
          } else if (result.shapes.size()) {
            found.push_back(make(result.shapes[0]));
          } else {
            found.push_back(result.plain);
          }
        }
      } else {
        for (int source : source_) found.push_back(args[size_t(source)]);
      }
      job->args = cpu_args(args);
    }
    enqueue_job(std::move(job), stream.stream(), label_);
    torch::jit::drop(*stack, count);
    for (auto& value : found) stack->push_back(std::move(value));
  }

 private:
  std::string name_;
  const char* label_;
  const Custom* custom_;
  bool draws_, dependent_, may_mix_, product_, any_fresh_ = false;
  std::vector<int> source_;  // per return the argument that it is, -1 for a new value
  std::vector<size_t> outs_;
  int generator_at_ = -1, dropout_at_ = -1;
  int meta_ = -1;  // whether the operator runs on meta tensors: a Meta kernel in C++, or ours; -1: not asked yet
  std::mutex lock_;
  std::unordered_map<std::string, Shapes> known_;

  static Tensor empty(const Shape& s, int device) {
    return at::detail::empty_strided_cuda(s.sizes, s.strides, s.dtype, at::Device(at::kCUDA, c10::DeviceIndex(device)));
  }

  int find_device(const std::vector<IValue>& args) {
    int device = -1;
    for (const IValue& value : args)
      each(value, [&](const Tensor& t) {
        if (t.is_cuda()) {
          if (device < 0) device = t.get_device();
          TORCH_CHECK(device == t.get_device() || t.dim() == 0 , "Expected all tensors to be on the same device, but found at least two devices, cuda:", device, " and cuda:", t.get_device(), "! (", name_, ")");
        } else {
          TORCH_CHECK(may_mix_ || t.dim() == 0 || t.device().is_meta(), "Expected all tensors to be on the same device, but found a tensor on ", t.device(), " (", name_, ")");
        }
      });
    for (const IValue& value : args)
      if (device < 0 && value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index()) device = value.toDevice().index();
    return device < 0 ? c10::cuda::current_device() : device;
  }

  bool masks(const std::vector<IValue>& args) {  // an index that is a mask
    if (name_ != "aten::index.Tensor" && name_ != "aten::index.Tensor_out") return false;
    bool found = false;
    each(args[1], [&](const Tensor& t) { found |= t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; });
    return found;
  }

  static Stack cpu_args(const std::vector<IValue>& args) {
    Stack out;
    out.reserve(args.size());
    for (const IValue& value : args) {
      if (value.isDevice()) out.push_back(at::Device(at::kCPU));
      else if (value.isGenerator()) out.push_back(IValue());
      else out.push_back(mapped(value, [](const Tensor& t) {
        if (t.is_cuda()) return on_cpu(t);
        Tensor copy = t.clone();
        if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
        return copy;
      }));
    }
    return out;
  }

  void draw(const std::vector<IValue>& args, int device, Seed& seed) {
    int64_t numel = 1;
    for (const IValue& value : args) each(value, [&](const Tensor& t) { numel = std::max(numel, t.numel()); });
    at::Generator generator = generator_at_ >= 0 && args[size_t(generator_at_)].isGenerator()
                                  ? args[size_t(generator_at_)].toGenerator()
                                  : at::cuda::detail::getDefaultCUDAGenerator(c10::DeviceIndex(device));
    auto* impl = at::check_generator<at::CUDAGeneratorImpl>(generator);
    std::lock_guard<std::mutex> hold(generator.mutex());
    seed.state = impl->philox_cuda_state(uint64_t((numel - 1) / (256 * 128 * 6 * 4) + 1) * 4);
  }

  Shapes infer(const c10::OperatorHandle& op, const std::vector<IValue>& args) {
    std::string key;
    bool keyed = true;
    for (const IValue& value : args) keyed = keyed && append_key(key, value);
    if (keyed) {
      std::lock_guard<std::mutex> hold(lock_);
      auto it = known_.find(key);
      if (it != known_.end()) return it->second;
    }
    if (meta_ < 0) {
      std::string table = op.dumpComputedTable();
      size_t at = table.find("\nMeta");
      std::string line = at == std::string::npos ? "" : table.substr(at + 1, table.find('\n', at + 1) - at);
      meta_ = custom_ || (line.size() && line.find("/dev/null") == std::string::npos && line.find("fallback") == std::string::npos &&
              line.find("MetaFallback") == std::string::npos && line.find("Math") == std::string::npos && op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta));
      if (EXTRA.count(name_)) meta_ = 0;
    }
    bool meta = meta_ == 1;
    Stack stack;
    std::unordered_map<void*, Tensor> twins;
    auto twin = [&](const Tensor& t) -> Tensor {
      if (!t.is_cuda()) return t;
      auto& found = twins[t.unsafeGetTensorImpl()];
      if (!found.defined()) found = meta ? on_meta(t) : dummy(t);
      return found;
    };
    for (const IValue& value : args) {
      if (value.isDevice()) stack.push_back(at::Device(meta ? at::kMeta : at::kCPU));
      else if (value.isGenerator()) stack.push_back(IValue());
      else stack.push_back(mapped(value, twin));
    }
    Stack given = stack;
    if (custom_ || !meta) run_cpu(op, custom_, stack);
    else op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    Shapes shapes;
    for (const IValue& value : stack) {
      Result result;
      if (value.isTensor()) result.shapes.push_back(shape_of(value.toTensor()));
      else if (value.isTensorList()) {
        result.is_list = true;
        for (const Tensor& t : value.toTensorVector()) result.shapes.push_back(shape_of(t));
      } else result.plain = value;
      shapes.results.push_back(std::move(result));
    }
    for (size_t j : outs_) {
      shapes.out_sizes.emplace_back();
      each(given[j], [&](const Tensor& t) { shapes.out_sizes.back().push_back(t.sizes().vec()); });
    }
    if (keyed) {
      std::lock_guard<std::mutex> hold(lock_);
      known_[key] = shapes;
    }
    return shapes;
  }
};

int emulate_operators(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  int count = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto found = dispatcher.findSchema(name);
    if (!found) continue;
    std::string full = toString(name);
    if (KEEP.count(full)) continue;
    if (!EXTRA.count(full) && !found->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    bool view = false;
    for (const auto& r : found->schema().returns()) view |= r.alias_info() && !r.alias_info()->isWrite();
    if (view) continue;
    library.impl(full.c_str() + 6, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Emulated>(*found)));
    count++;
  }
  return count;
}

}  // namespace fakecuda
