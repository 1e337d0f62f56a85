// Flash, memory-efficient and cuDNN's attention by the CPU's kernel. Sizes are torch's: [batch, heads, tokens, width]; of
// packed rows [tokens, heads, width], where ``lengths`` says at which token each document begins and the last one ends.
#include "kernels.h"

#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace {
using namespace fake;
using Optional = std::optional<Tensor>;
using Scale = std::optional<double>;

// As a mask, a bias and groups of heads come to the kernel.
struct How {
  bool causal;
  Optional bias;
  Scale scale;
  int64_t before = -1;  // of packed rows: so many tokens before its own are seen; -1: all
};

Optional there(const Optional& given) { return given && given->defined() ? Optional(for_stream(*given)) : std::nullopt; }

// Heads of keys and values are as many as those of queries, or each serves several.
Tensor repeated(const Tensor& given, const Tensor& q) {
  return given.size(1) == q.size(1) ? given : given.repeat_interleave(q.size(1) / given.size(1), 1);
}
Tensor summed(const Tensor& grad, const Tensor& given) {
  if (grad.size(1) == given.size(1)) return grad;
  return grad.unflatten(1, {given.size(1), grad.size(1) / given.size(1)}).sum(2);
}

// Both run on a stream's thread.
void forward(const Tensor& q, const Tensor& k, const Tensor& v, const How& how, const Tensor& out, const Tensor& sums) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto [found, logs] = at::_scaled_dot_product_flash_attention_for_cpu(q, repeated(k, q), repeated(v, q), 0.0, how.causal, how.bias, how.scale);
  out.copy_(found);
  sums.copy_(logs);
}
void backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& sums,
              const How& how, const std::array<Tensor, 3>& to) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, q, repeated(k, q), repeated(v, q), out, sums, 0.0, how.causal, how.bias, how.scale);
  to[0].copy_(dq);
  to[1].copy_(summed(dk, k));
  to[2].copy_(summed(dv, v));
}

struct Found { Tensor out, sums; };

Found attend(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& bias, bool causal, Scale scale) {
  c10::cuda::CUDAGuard guard(q.device());
  // In memory the output is [batch, tokens, heads, width], as flash leaves it.
  Tensor out = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
  Tensor sums = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  issue_kernel([q = for_stream(q), k = for_stream(k), v = for_stream(v), how = How{causal, there(bias), scale},
                to = for_stream(out), logs = for_stream(sums)] { forward(q, k, v, how, to, logs); }, false);
  return {out, sums};
}

std::tuple<Tensor, Tensor, Tensor> attend_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const Tensor& out, const Tensor& sums, const Optional& bias, bool causal, Scale scale) {
  c10::cuda::CUDAGuard guard(q.device());
  Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  issue_kernel([grad = for_stream(grad), q = for_stream(q), k = for_stream(k), v = for_stream(v), out = for_stream(out),
                sums = for_stream(sums), how = How{causal, there(bias), scale},
                to = std::array{for_stream(dq), for_stream(dk), for_stream(dv)}] {
    backward(grad, q, k, v, out, sums, how, to);
  }, false);
  return {dq, dk, dv};
}

// What is drawn in attention that drops, of which there is none here (``choose``).
void drops_nothing(double dropout) { TORCH_CHECK(dropout == 0, NAME, ": attention drops nothing"); }
Tensor none(const Tensor& like, c10::ScalarType dtype) { return at::zeros({}, like.options().dtype(dtype)); }

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal, bool, Scale scale) {
  drops_nothing(dropout);
  auto [out, sums] = attend(q, k, v, {}, causal, scale);
  return {out, sums, Tensor(), Tensor(), q.size(2), k.size(2), none(q, at::kUInt64), none(q, at::kUInt64), at::empty({0}, q.options())};
}
std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& sums, const Tensor&,
    const Tensor&, c10::SymInt, c10::SymInt, double, bool causal, const Tensor&, const Tensor&, Scale scale) {
  return attend_backward(grad, q, k, v, out, sums, {}, causal, scale);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& bias, bool,
                                                     double dropout, bool causal, Scale scale) {
  drops_nothing(dropout);
  auto [out, sums] = attend(q, k, v, bias, causal, scale);
  return {out, sums, none(q, at::kLong), none(q, at::kLong)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const Tensor& out, const Tensor& sums,
    const Tensor&, const Tensor&, double, std::array<bool, 4> wanted, bool causal, Scale scale) {
  TORCH_CHECK(!wanted[3] || !bias.defined(), NAME, ": the bias of attention has no gradient");
  auto [dq, dk, dv] = attend_backward(grad, q, k, v, out, sums, bias, causal, scale);
  return {dq, dk, dv, Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> cudnn(
    const Tensor& q, const Tensor& k, const Tensor& v, const Optional& bias, bool, double dropout, bool causal, bool, Scale scale) {
  drops_nothing(dropout);
  auto [out, sums] = attend(q, k, v, bias, causal, scale);
  return {out, sums, Tensor(), Tensor(), q.size(2), k.size(2), none(q, at::kLong), none(q, at::kLong), Tensor()};
}
std::tuple<Tensor, Tensor, Tensor> cudnn_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& sums, const Tensor&,
    const Tensor&, const Tensor& bias, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double, bool causal, Scale scale) {
  return attend_backward(grad, q, k, v, out, sums, bias, causal, scale);
}

// --- packed rows

How windowed(bool causal, std::optional<c10::SymInt> left, std::optional<c10::SymInt> right, Scale scale) {
  int64_t before = left ? left->expect_int() : -1, after = right ? right->expect_int() : -1;
  TORCH_CHECK(after == 0 || (after < 0 && before < 0), NAME, ": attention has no windows that see what follows");
  return {causal || after == 0, {}, scale, before};
}
// The same for a document of so many tokens: a window is a bias, on a stream's thread.
How of_document(const How& how, const Tensor& like, int64_t tokens) {
  if (how.before < 0 || tokens <= how.before + 1) return how;
  at::AutoDispatchBelowADInplaceOrView below;
  auto seen = at::ones({tokens, tokens}, like.options().dtype(at::kBool)).tril().triu(-how.before);
  auto bias = at::zeros({tokens, tokens}, like.options()).masked_fill_(seen.logical_not(), -std::numeric_limits<double>::infinity());
  return {false, bias, how.scale};
}

// A document of [tokens, heads, width] as the kernel takes it; and its part of sums [heads, tokens].
Tensor document(const Tensor& tokens, int64_t begin, int64_t end) { return tokens.slice(0, begin, end).transpose(0, 1).unsqueeze(0); }
Tensor document_sums(const Tensor& sums, int64_t begin, int64_t end) { return sums.slice(1, begin, end).unsqueeze(0); }

// ``work(queries' begin and end, keys' begin and end)`` of each document; on a stream's thread, which can read the lengths.
template <class Work> void each_document(const Tensor& queries, const Tensor& keys, Work work) {
  auto from = queries.to(at::kLong), other = keys.to(at::kLong);
  auto *q = from.const_data_ptr<int64_t>(), *k = other.const_data_ptr<int64_t>();
  for (int64_t i = 0; i + 1 < from.numel(); i++)
    if (q[i] < q[i + 1]) work(q[i], q[i + 1], k[i], k[i + 1]);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> packed(
    const Tensor& q, const Tensor& k, const Tensor& v, const Optional& lengths, const Optional& lengths_of_keys, c10::SymInt,
    c10::SymInt, double dropout, bool causal, bool, Scale scale, std::optional<c10::SymInt> left, std::optional<c10::SymInt> right,
    const Optional& used, const Optional& slopes) {
  c10::cuda::CUDAGuard guard(q.device());
  drops_nothing(dropout);
  TORCH_CHECK(lengths && lengths_of_keys && !used && !slopes, NAME, ": flash attention of packed rows alone");
  Tensor out = at::empty_like(q), sums = at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat));
  issue_kernel([q = for_stream(q), k = for_stream(k), v = for_stream(v), out = for_stream(out), sums = for_stream(sums),
                queries = for_stream(*lengths), keys = for_stream(*lengths_of_keys), how = windowed(causal, left, right, scale)] {
    each_document(queries, keys, [&](int64_t a, int64_t b, int64_t c, int64_t d) {
      forward(document(q, a, b), document(k, c, d), document(v, c, d), of_document(how, q, b - a), document(out, a, b),
              document_sums(sums, a, b));
    });
  }, false);
  return {out, sums, none(q, at::kUInt64), none(q, at::kUInt64), at::empty({0}, q.options())};
}
std::tuple<Tensor, Tensor, Tensor> packed_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& sums, const Tensor& lengths,
    const Tensor& lengths_of_keys, c10::SymInt, c10::SymInt, double, bool causal, const Tensor&, const Tensor&, Scale scale,
    std::optional<c10::SymInt> left, std::optional<c10::SymInt> right) {
  c10::cuda::CUDAGuard guard(q.device());
  Tensor dq = at::zeros_like(q), dk = at::zeros_like(k), dv = at::zeros_like(v);
  issue_kernel([grad = for_stream(grad), q = for_stream(q), k = for_stream(k), v = for_stream(v), out = for_stream(out),
                sums = for_stream(sums), queries = for_stream(lengths), keys = for_stream(lengths_of_keys),
                how = windowed(causal, left, right, scale), dq = for_stream(dq), dk = for_stream(dk), dv = for_stream(dv)] {
    each_document(queries, keys, [&](int64_t a, int64_t b, int64_t c, int64_t d) {
      backward(document(grad, a, b), document(q, a, b), document(k, c, d), document(v, c, d), document(out, a, b),
               document_sums(sums, a, b), of_document(how, q, b - a), {document(dq, a, b), document(dk, c, d), document(dv, c, d)});
    });
  }, false);
  return {dq, dk, dv};
}

// Attention that drops is put together of other operators: the CPU's kernel drops nothing.
int64_t choose(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& mask, double dropout, bool causal, Scale scale,
               bool grouped) {
  if (dropout > 0) return static_cast<int64_t>(at::SDPBackend::math);
  return at::native::_fused_sdp_choice_cuda(q, k, v, mask, dropout, causal, scale, grouped);
}
}  // namespace

namespace fake {
void replace_attention(torch::Library& library) {
  library.impl("_scaled_dot_product_flash_attention", flash);
  library.impl("_scaled_dot_product_flash_attention_backward", flash_backward);
  library.impl("_scaled_dot_product_efficient_attention", efficient);
  library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward);
  library.impl("_scaled_dot_product_cudnn_attention", cudnn);
  library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward);
  library.impl("_flash_attention_forward", packed);
  library.impl("_flash_attention_backward", packed_backward);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
}
}  // namespace fake
