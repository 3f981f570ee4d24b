// Softmax attention in float, with the shapes, layouts and saved values of CUDA's fused kernels (flash and efficient).
#include "torch_part.h"

namespace fakecuda {

static double scale_of(const IValue& scale, const Tensor& q) {
  return scale.isNone() ? 1 / std::sqrt(double(q.size(-1))) : scale.toDouble();
}

static Tensor dropout_mask(const at::IntArrayRef& sizes, double p, int64_t seed) {
  auto generator = at::detail::createCPUGenerator(uint64_t(seed) * 0x9E3779B97F4A7C15ull);
  return at::empty(sizes, at::kFloat).bernoulli_(1 - p, generator).div_(1 - p);
}

static int64_t seed_in(const IValue& saved, double p) {
  Tensor t = saved.toTensor();
  return p > 0 && !t.is_meta() ? t.to(at::kLong).flatten()[0].item<int64_t>() : 0;
}

static Tensor in_cuda_layout(const Tensor& x, at::ScalarType dtype) {  // (rows, heads, length, size) over (rows, length, heads, size)
  return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options().dtype(dtype)).transpose(1, 2).copy_(x);
}

struct Attention {
  Tensor q, k, v, bias;
  bool causal;
  double p, scale;
  int64_t group = q.size(1) / k.size(1);  // so many heads of the queries share one of the keys

  Tensor for_queries(const Tensor& t) const {
    if (group == 1) return t.to(at::kFloat);
    return t.to(at::kFloat).unsqueeze(2).expand({-1, -1, group, -1, -1}).flatten(1, 2);
  }
  Tensor for_keys(const Tensor& t) const {
    return group == 1 ? t : t.view({t.size(0), t.size(1) / group, group, t.size(2), t.size(3)}).sum(2);
  }

  Tensor scores() const {
    Tensor s = at::matmul(q.to(at::kFloat), for_queries(k).transpose(-2, -1)) * scale;
    if (bias.defined()) s = s + bias.to(at::kFloat);
    if (!causal) return s;
    auto allowed = at::ones({q.size(-2), k.size(-2)}, s.options().dtype(at::kBool)).tril();
    return s.masked_fill(allowed.logical_not(), -std::numeric_limits<float>::infinity());
  }

  struct Forward { Tensor out, logsumexp; int64_t seed; };
  Forward forward() const {
    Tensor s = scores(), lse = at::logsumexp(s, -1), weights = at::exp(s - lse.unsqueeze(-1));
    int64_t seed = 0;
    if (p > 0 && drawing) {
      seed = int64_t(drawing->current_seed() >> 1);
      weights = weights * dropout_mask(weights.sizes(), p, seed);
    }
    return {in_cuda_layout(at::matmul(weights, for_queries(v)), q.scalar_type()), lse, seed};
  }

  struct Backward { Tensor q, k, v, scores; };
  Backward backward(const Tensor& grad_out, const Tensor& logsumexp, int64_t seed) const {
    Tensor g = grad_out.to(at::kFloat), w = at::exp(scores() - logsumexp.unsqueeze(-1)), mask;
    if (p > 0) mask = w.is_meta() ? w : dropout_mask(w.sizes(), p, seed);
    Tensor gv = at::matmul((p > 0 ? w * mask : w).transpose(-2, -1), g);
    Tensor gw = at::matmul(g, for_queries(v).transpose(-2, -1));
    if (p > 0) gw = gw * mask;
    Tensor gs = w * (gw - (gw * w).sum(-1, true));
    Tensor gq = at::matmul(gs, for_queries(k)) * scale, gk = at::matmul(gs.transpose(-2, -1), q.to(at::kFloat)) * scale;
    auto dtype = q.scalar_type();
    return {in_cuda_layout(gq, dtype), in_cuda_layout(for_keys(gk), dtype), in_cuda_layout(for_keys(gv), dtype), gs};
  }
};

// Sequences of any length side by side, with the constraints of mha_varlen_fwd and mha_varlen_bwd (flash_api.cpp). An
// offset that is none, and a sequence longer than it was said to be, on which a GPU computes nonsense, fail the device.
static Attention packed(Stack& s, size_t at, const Tensor& offsets_q, const Tensor& offsets_k, int64_t max_q, double p,
                        bool causal, const IValue& scale) {
  Tensor q = s[at].toTensor(), k = s[at + 1].toTensor(), v = s[at + 2].toTensor();
  TORCH_CHECK(offsets_q.defined() && offsets_k.defined() && q.dim() == 3, "fakecuda: only packed rows are computed");
  TORCH_CHECK(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16, "FlashAttention only supports fp16 and bf16");
  TORCH_CHECK(q.size(2) % 8 == 0 && q.size(2) <= 256 && q.size(2) == v.size(2), "head size ", q.size(2));
  TORCH_CHECK(offsets_q.scalar_type() == at::kInt && offsets_q.is_contiguous(), "cu_seqlens must be int32 and contiguous");
  TORCH_CHECK(q.stride(2) == 1 && k.stride(2) == 1 && v.stride(2) == 1 && p == 0, "strides or dropout");
  int64_t total = q.size(0);
  Tensor hidden = at::zeros({total, total}, q.options().dtype(at::kBool));
  if (!q.is_meta()) {
    Tensor lengths = offsets_q.diff();
    TORCH_CHECK(at::equal(offsets_q, offsets_k) && offsets_q[0].item<int>() == 0 && offsets_q[-1].item<int>() == total &&
                lengths.min().item<int>() >= 0 && lengths.max().item<int>() <= max_q, "cu_seqlens are ", offsets_q);
    Tensor number = at::searchsorted(offsets_q.slice(0, 1), at::arange(total, at::kInt), false, true);
    hidden = number.unsqueeze(1) != number.unsqueeze(0);
  }
  if (causal) hidden = hidden.logical_or(at::ones({total, total}, hidden.options()).triu(1));
  Tensor bias = at::zeros({total, total}, q.options().dtype(at::kFloat));
  auto heads_first = [](const Tensor& t) { return t.transpose(0, 1).unsqueeze(0); };
  bias = bias.masked_fill(hidden, -std::numeric_limits<float>::infinity());
  return {heads_first(q), heads_first(k), heads_first(v), bias, false, 0.0, scale_of(scale, q)};
}

static Tensor rows_first(const Tensor& t) { return t.squeeze(0).transpose(0, 1); }

static void add_packed_attention() {
  auto& table = customs();
  // (query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale, ...)
  //   -> output, softmax_logsumexp, rng_state, unused, debug_attn_mask
  table["aten::_flash_attention_forward"] = [](Stack& s) {
    auto attention = packed(s, 0, maybe(s[3]), maybe(s[4]), s[5].toInt(), s[7].toDouble(), s[8].toBool(), s[10]);
    auto found = attention.forward();
    Tensor rng = at::zeros({2}, at::kLong).to(at::kUInt64);
    s = {rows_first(found.out), found.logsumexp.squeeze(0), rng, at::scalar_tensor(0, at::kLong).to(at::kUInt64),
         at::empty({0}, found.out.options())};
  };
  // (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng, unused, *, scale)
  table["aten::_flash_attention_backward"] = [](Stack& s) {
    auto attention = packed(s, 1, maybe(s[6]), maybe(s[7]), s[8].toInt(), s[10].toDouble(), s[11].toBool(), s[14]);
    auto found = attention.backward(s[0].toTensor().transpose(0, 1).unsqueeze(0), s[5].toTensor().unsqueeze(0), 0);
    s = {rows_first(found.q), rows_first(found.k), rows_first(found.v)};
  };
}

void add_attention() {
  add_packed_attention();
  auto& table = customs();
  // (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, *, scale) -> out, lse, seed, offset
  table["aten::_scaled_dot_product_efficient_attention"] = [](Stack& s) {
    Tensor q = s[0].toTensor();
    Attention attention{q, s[1].toTensor(), s[2].toTensor(), maybe(s[3]), s[6].toBool(), s[5].toDouble(), scale_of(s[7], q)};
    auto found = attention.forward();
    int64_t padded = s[4].toBool() ? (q.size(2) + 31) / 32 * 32 : 0;
    Tensor saved = at::zeros({q.size(0), q.size(1), padded}, q.options().dtype(at::kFloat));
    if (padded) saved.slice(-1, 0, q.size(2)).copy_(found.logsumexp);
    s = {found.out, saved, at::scalar_tensor(found.seed, at::kLong), at::scalar_tensor(0, at::kLong)};
  };
  // (grad_out, query, key, value, attn_bias, out, logsumexp, seed, offset, dropout_p, grad_input_mask, is_causal, *, scale)
  table["aten::_scaled_dot_product_efficient_attention_backward"] = [](Stack& s) {
    Tensor q = s[1].toTensor(), bias = maybe(s[4]), kept = s[6].toTensor();
    Attention attention{q, s[2].toTensor(), s[3].toTensor(), bias, s[11].toBool(), s[9].toDouble(), scale_of(s[12], q)};
    Tensor lse = kept.size(-1) >= q.size(2) ? kept.slice(-1, 0, q.size(2)) : at::logsumexp(attention.scores(), -1);
    auto found = attention.backward(s[0].toTensor(), lse, seed_in(s[7], attention.p));
    Tensor grad_bias;
    if (bias.defined() && s[10].toBoolList().get(3)) grad_bias = at::sum_to(found.scores, bias.sizes()).to(bias.scalar_type());
    s = {found.q, found.k, found.v, grad_bias};
  };
  // (query, key, value, dropout_p, is_causal, return_debug_mask, *, scale)
  //   -> out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, rng_state, unused, debug_attn_mask
  table["aten::_scaled_dot_product_flash_attention"] = [](Stack& s) {
    Tensor q = s[0].toTensor(), k = s[1].toTensor();
    Attention attention{q, k, s[2].toTensor(), Tensor(), s[4].toBool(), s[3].toDouble(), scale_of(s[6], q)};
    auto found = attention.forward();
    Tensor rng = at::zeros({2}, at::kLong);
    rng[0].fill_(found.seed);
    s = {found.out, found.logsumexp, Tensor(), Tensor(), q.size(2), k.size(2), rng.to(at::kUInt64),
         at::scalar_tensor(0, at::kLong).to(at::kUInt64), at::empty({0}, q.options())};
  };
  // (grad_out, query, key, value, out, logsumexp, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale)
  table["aten::_scaled_dot_product_flash_attention_backward"] = [](Stack& s) {
    Tensor q = s[1].toTensor();
    Attention attention{q, s[2].toTensor(), s[3].toTensor(), Tensor(), s[11].toBool(), s[10].toDouble(), scale_of(s[14], q)};
    auto found = attention.backward(s[0].toTensor(), s[5].toTensor(), seed_in(s[12], attention.p));
    s = {found.q, found.k, found.v};
  };
}

}  // namespace fakecuda
