// Operators that the CPU lacks or refuses, or whose results have other types there: dropout with its mask, softmax from
// half to float, LSTM cells, layer norm.
#include "torch_part.h"

namespace fakecuda {

thread_local at::Generator* drawing = nullptr;

std::unordered_map<std::string, Custom>& customs() {
  static auto* table = new std::unordered_map<std::string, Custom>;
  return *table;
}

void add_substitutes() {
  auto& table = customs();
  table["aten::native_dropout"] = [](Stack& s) {  // input, p, train
    Tensor x = s[0].toTensor();
    double p = s[1].toDouble();
    bool train = s[2].isNone() || s[2].toBool();
    Tensor mask = at::empty(x.sizes(), x.options().dtype(at::kBool));
    Tensor out;
    if (!train || p == 0) {
      mask.fill_(true);
      out = x.clone();
    } else if (p == 1) {
      mask.fill_(false);
      out = at::zeros_like(x);
    } else {
      drawing ? mask.bernoulli_(1 - p, *drawing) : mask.fill_(true);
      out = x.mul(mask).mul_(1 / (1 - p));
    }
    s = {out, mask};
  };
  for (const char* name : {"_softmax", "_log_softmax"}) {
    bool log = name[1] == 'l';
    table[std::string("aten::") + name] = [log](Stack& s) {  // also from half to float, which the CPU refuses
      Tensor x = s[0].toTensor();
      if (s[2].toBool()) x = x.to(at::kFloat);
      Tensor out = log ? at::_log_softmax(x, s[1].toInt(), false) : at::_softmax(x, s[1].toInt(), false);
      s = {out};
    };
    table[std::string("aten::") + name + ".out"] = [log](Stack& s) {
      Tensor x = s[0].toTensor(), out = s[3].toTensor();
      if (s[2].toBool()) x = x.to(at::kFloat);
      out.copy_(log ? at::_log_softmax(x, s[1].toInt(), false) : at::_softmax(x, s[1].toInt(), false));
      s = {out};
    };
    table[std::string("aten::") + name + "_backward_data"] = [log](Stack& s) {
      Tensor g = s[0].toTensor(), y = s[1].toTensor();
      auto dtype = s[3].toScalarType();
      Tensor out = log ? at::_log_softmax_backward_data(g, y, s[2].toInt(), y.scalar_type())
                       : at::_softmax_backward_data(g, y, s[2].toInt(), y.scalar_type());
      s = {out.to(dtype)};
    };
    table[std::string("aten::") + name + "_backward_data.out"] = [log](Stack& s) {
      Tensor g = s[0].toTensor(), y = s[1].toTensor(), out = s[4].toTensor();
      out.copy_(log ? at::_log_softmax_backward_data(g, y, s[2].toInt(), y.scalar_type())
                    : at::_softmax_backward_data(g, y, s[2].toInt(), y.scalar_type()));
      s = {out};
    };
  }
  table["aten::_thnn_fused_lstm_cell"] = [](Stack& s) {  // input_gates, hidden_gates, cx, input_bias, hidden_bias
    Tensor gates = s[0].toTensor() + s[1].toTensor(), cx = s[2].toTensor();
    for (int i : {3, 4})
      if (maybe(s[i]).defined()) gates = gates + maybe(s[i]);
    auto part = gates.chunk(4, 1);
    Tensor i = part[0].sigmoid(), f = part[1].sigmoid(), g = part[2].tanh(), o = part[3].sigmoid();
    Tensor cy = f * cx + i * g, hy = o * cy.tanh();
    s = {hy, cy, at::cat({i, f, g, o}, 1)};
  };
  table["aten::_thnn_fused_lstm_cell_backward_impl"] = [](Stack& s) {  // grad_hy, grad_cy, cx, cy, workspace, has_bias
    Tensor cx = s[2].toTensor(), cy = s[3].toTensor(), gh = maybe(s[0]), gc = maybe(s[1]);
    auto part = s[4].toTensor().chunk(4, 1);
    Tensor i = part[0], f = part[1], g = part[2], o = part[3], t = cy.tanh();
    if (!gh.defined() && !gc.defined()) {
      s = {Tensor(), Tensor(), Tensor()};
      return;
    }
    Tensor d = gc.defined() ? gc : at::zeros_like(cy), h = gh.defined() ? gh : at::zeros_like(cy);
    d = d + h * o * (1 - t * t);
    Tensor gates = at::cat({d * g * i * (1 - i), d * cx * f * (1 - f), d * i * (1 - g * g), h * t * o * (1 - o)}, 1);
    s = {gates, d * f, s[5].toBool() ? gates.sum(0) : Tensor()};
  };
  // As on a GPU: computed in fp32, which mean and rstd are, whatever the input is.
  static const auto widened = [](const Tensor& t) { return t.defined() && t.scalar_type() != at::kDouble ? t.to(at::kFloat) : t; };
  table["aten::native_layer_norm"] = [](Stack& s) {  // input, normalized_shape, weight, bias, eps
    Tensor x = s[0].toTensor();
    auto [out, mean, rstd] = at::native_layer_norm(widened(x), s[1].toIntVector(), widened(maybe(s[2])), widened(maybe(s[3])), s[4].toDouble());
    s = {out.to(x.scalar_type()), mean, rstd};
  };
  table["aten::native_layer_norm_backward"] = [](Stack& s) {  // grad_out, input, shape, mean, rstd, weight, bias, output_mask
    Tensor x = s[1].toTensor(), weight = maybe(s[5]), bias = maybe(s[6]);
    auto wanted = s[7].toBoolList();
    std::array<bool, 3> mask{wanted[0], wanted[1] && weight.defined(), wanted[2] && bias.defined()};
    std::array<Tensor, 3> like{x, weight, bias}, grads;
    if (x.is_meta()) {
      for (int i = 0; i < 3; i++)
        if (mask[i]) grads[i] = at::empty_like(like[i], at::MemoryFormat::Contiguous);
    } else {
      auto shape = s[2].toIntVector();
      std::tie(grads[0], grads[1], grads[2]) = at::native_layer_norm_backward(
          widened(s[0].toTensor()), widened(x), shape, widened(s[3].toTensor()), widened(s[4].toTensor()), widened(weight), widened(bias), mask);
      for (int i = 0; i < 3; i++)
        if (mask[i]) grads[i] = grads[i].to(like[i].scalar_type());
    }
    s = {grads[0], grads[1], grads[2]};
  };
}

}  // namespace fakecuda
