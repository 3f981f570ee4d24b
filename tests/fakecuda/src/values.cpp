// Tensors of a call as CPU tensors over the same memory, as empty twins, and as a key.
#include "torch_part.h"

namespace fakecuda {

Tensor on_cpu(const Tensor& t) {
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (t.numel() == 0) return at::detail::empty_strided_cpu(t.sizes(), t.strides(), options);
  Tensor out = at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [](void*) {}, options, at::Device(at::kCPU));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}

Tensor on_meta(const Tensor& t) {
  Tensor out = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}

Tensor dummy(const Tensor& t) {
  Tensor out = at::detail::empty_strided_cpu(t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()));
  out.zero_();
  return out;
}

IValue mapped(const IValue& value, const std::function<Tensor(const Tensor&)>& f) {
  if (value.isTensor()) {
    const Tensor& t = value.toTensor();
    return t.defined() ? IValue(f(t)) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : value.toTensorVector()) out.push_back(t.defined() ? f(t) : t);
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
      out.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return out;
  }
  if (value.isList() && value.toListRef().size() && (value.toListRef()[0].isTensor() || value.toListRef()[0].isNone())) {
    c10::List<std::optional<Tensor>> out;
    for (const IValue& v : value.toListRef())
      out.push_back(v.isTensor() && v.toTensor().defined() ? std::optional<Tensor>(f(v.toTensor())) : std::nullopt);
    return out;
  }
  return value;
}

void each(const IValue& value, const std::function<void(const Tensor&)>& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& v : value.toListRef())
      if (v.isTensor() && v.toTensor().defined()) f(v.toTensor());
  }
}

bool append_key(std::string& key, const IValue& value) {
  auto put = [&](const void* p, size_t n) { key.append((const char*)p, n); };
  auto number = [&](int64_t x) { put(&x, 8); };
  if (value.isTensor()) {
    const Tensor& t = value.toTensor();
    if (!t.defined()) { key += 'u'; return true; }
    key += t.is_cuda() ? 'T' : 'C';
    key += char(t.scalar_type());
    key += char(t.unsafeGetTensorImpl()->is_wrapped_number());
    number(t.dim());
    for (auto x : t.sizes()) number(x);
    for (auto x : t.strides()) number(x);
  } else if (value.isNone()) key += 'n';
  else if (value.isInt()) { key += 'i'; number(value.toInt()); }
  else if (value.isBool()) key += value.toBool() ? 'y' : 'z';
  else if (value.isDouble()) { key += 'd'; double x = value.toDouble(); put(&x, 8); }
  else if (value.isString()) { key += 's'; key += value.toStringRef(); key += '\0'; }
  else if (value.isComplexDouble()) { key += 'c'; auto x = value.toComplexDouble(); put(&x, 16); }
  else if (value.isDevice()) { key += 'D'; number(value.toDevice().index()); }
  else if (value.isGenerator()) key += 'g';
  else if (value.isList()) {
    key += '[';
    number(int64_t(value.toListRef().size()));
    for (const IValue& v : value.toListRef())
      if (!append_key(key, v)) return false;
  } else return false;
  return true;
}

Shape shape_of(const Tensor& t) {
  Shape s;
  s.defined = t.defined();
  if (s.defined) {
    s.sizes = t.sizes().vec();
    s.strides = t.strides().vec();
    s.dtype = t.scalar_type();
  }
  return s;
}

}  // namespace fakecuda
