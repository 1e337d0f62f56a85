// Operators of a device by the kernels of the CPU, on the threads of its streams. For devices that are made of host
// memory: kernels.h, and the fake CUDA beside it. Whoever includes it has defined before:
//
//   NAME                             the device in error messages
//   on_device(tensor)                whether it lies there
//   for_stream(tensor)               the same elements for a kernel of the CPU
//   make(sizes, strides, dtype)      a tensor without values on the current device
//   issue(task, waits)               queue a copy or a kernel on the current stream; maybe wait until it is done
//   issue_kernel(task, waits)        the same, counted and delayed
//   raise_failure()                  throw what went wrong in a stream
//   next_seed(generator)             the next number of this generator of the device, or of its default one
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/histc.h>

#include <map>
#include <optional>
#include <set>

namespace {
using at::Tensor;
using c10::IValue;

std::mutex waited_m;
std::map<std::string, int64_t> waited_for;  // which operators made the caller wait, and how often

// Their results have other sizes or types on the CPU than torch's kernels for sizes say.
const std::set<std::string> UNLIKE_META{"aten::native_batch_norm"};

template <class Change> void each_tensor(IValue& value, Change change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& one : list) one = change(one);
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> one : value.toOptionalTensorVector()) list.push_back(one ? std::optional<Tensor>(change(*one)) : one);
    value = list;
  }
}

std::vector<Tensor> tensors_of(const IValue& value) {
  std::vector<Tensor> found;
  IValue copy = value;
  each_tensor(copy, [&](const Tensor& one) { found.push_back(one); return one; });
  return found;
}

struct Call {
  const c10::OperatorHandle& op;
  torch::jit::Stack given, host;  // the arguments, and what the CPU's kernel gets
  bool resizes = false, hands_over = false, indexes_from_host = false;

  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op(op) {
    const auto& arguments = op.schema().arguments();
    given.assign(stack->end() - static_cast<int64_t>(arguments.size()), stack->end());
    torch::jit::drop(*stack, arguments.size());
    bool indexes = op.schema().name().find("index") != std::string::npos;
    host = given;
    for (size_t i = 0; i < host.size(); i++) {
      bool written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
      each_tensor(host[i], [&](const Tensor& one) {
        if (!one.defined()) return one;
        if (on_device(one)) {
          resizes |= written && one.numel() == 0;
          return for_stream(one);
        }
        TORCH_CHECK(one.dim() == 0 || indexes, NAME, ": Expected all tensors to be on the same device: ", op.schema().name(),
                    " got a tensor of ", one.device());
        indexes_from_host |= one.dim() > 0;
        Tensor number = one.clone();  // numbers of the host are read when the kernel is issued
        if (one.unsafeGetTensorImpl()->is_wrapped_number()) number.unsafeGetTensorImpl()->set_wrapped_number(true);
        return number;
      });
      if (host[i].isDevice()) host[i] = c10::Device(c10::kCPU);
      // A kernel draws from a generator of its own, whose seed is drawn when the kernel is issued: so nobody waits.
      if (arguments[i].type()->str() == "Generator?") host[i] = at::detail::createCPUGenerator(next_seed(given[i]));
    }
    for (const auto& result : op.schema().returns())
      hands_over |= result.type()->kind() != c10::TypeKind::TensorType && result.type()->str() != "Tensor[]";
  }

  // The argument that a result is, or is a view of.
  std::optional<size_t> source_of(const c10::Argument& result) const {
    if (!result.alias_info()) return std::nullopt;
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++)
      if (arguments[i].alias_info() && arguments[i].alias_info()->beforeSets() == result.alias_info()->beforeSets()) return i;
    return std::nullopt;
  }

  // Empty results of the right sizes, if they can be told beforehand.
  std::optional<torch::jit::Stack> results() const {
    torch::jit::Stack found;
    bool fresh = false;
    for (const auto& result : op.schema().returns()) {
      auto source = source_of(result);
      fresh |= !source;
      if (source && !result.alias_info()->isWrite()) return std::nullopt;
      found.push_back(source ? given[*source] : IValue());
    }
    if (!fresh) return found;
    auto metas = given;
    if (!run_for_sizes(metas)) return std::nullopt;
    for (size_t i = 0; i < found.size(); i++) {
      if (!found[i].isNone()) continue;
      found[i] = metas[i];
      // The CPU's means and deviations have the type of what they are of.
      bool as_given = op.schema().name() == "aten::native_layer_norm";
      each_tensor(found[i], [&](const Tensor& meta) {
        auto dtype = as_given ? given[0].toTensor().scalar_type() : meta.scalar_type();
        return meta.defined() ? make(meta.sizes(), meta.strides(), dtype) : meta;
      });
    }
    return found;
  }

  // Give the results that are empty as yet their sizes, if they can be told beforehand.
  bool make_room() {
    auto metas = given;
    if (op.schema().returns().size() != 1 || !source_of(op.schema().returns()[0]) || !run_for_sizes(metas)) return false;
    size_t out = *source_of(op.schema().returns()[0]);
    if (!given[out].isTensor() || !metas[0].isTensor()) return false;
    at::native::resize_output(given[out].toTensor(), metas[0].toTensor().sizes());
    host[out] = for_stream(given[out].toTensor());
    resizes = false;
    return true;
  }

  // Torch's own kernels for sizes alone leave results without memory in place of the arguments.
  bool run_for_sizes(torch::jit::Stack& metas) const {
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::Meta) || UNLIKE_META.count(op.schema().name())) return false;
    for (auto& value : metas) {
      each_tensor(value, [](const Tensor& one) {
        return on_device(one) ? at::empty_strided(one.sizes(), one.strides(), one.options().device(at::kMeta)) : one;
      });
      if (value.isDevice()) value = c10::Device(c10::kMeta);
      if (value.isGenerator()) value = IValue();
    }
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &metas);
    } catch (const std::exception&) { return false; }
    return true;
  }
};

void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto kept = stack;  // torch before 2.13 lets go of the arguments before it copies results that are arguments
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

// Nobody waits: the results are there, their numbers come.
void queue(Call& call, const torch::jit::Stack& results) {
  std::vector<std::vector<Tensor>> to;
  for (const auto& result : results) {
    to.emplace_back();
    for (const auto& one : tensors_of(result)) to.back().push_back(one.defined() ? for_stream(one) : one);
  }
  issue_kernel([op = call.op, host = std::move(call.host), to]() mutable {
    run(op, host);
    for (size_t i = 0; i < to.size(); i++) {
      auto found = tensors_of(host[i]);
      for (size_t j = 0; j < to[i].size(); j++) {
        if (!to[i][j].defined() || found[j].const_data_ptr() == to[i][j].const_data_ptr()) continue;
        TORCH_CHECK(found[j].sizes() == to[i][j].sizes() && found[j].scalar_type() == to[i][j].scalar_type(),
                    op.schema().name(), " has other results than was said beforehand: ", found[j].scalar_type(), found[j].sizes(),
                    ", not ", to[i][j].scalar_type(), to[i][j].sizes());
        at::AutoDispatchBelowADInplaceOrView below;
        to[i][j].copy_(found[j]);
      }
    }
  }, false);
}

// The caller waits, and makes the results of what the kernel left.
torch::jit::Stack wait_for(Call& call) {
  { Lock lock(waited_m); waited_for[call.op.schema().name()]++; }
  auto left = call.host;
  issue_kernel([&] { run(call.op, left); }, true);
  const auto& returns = call.op.schema().returns();
  auto fill = [](const Tensor& found, const Tensor& given) {
    if (found.numel())
      issue([found, to = for_stream(given)] { at::AutoDispatchBelowADInplaceOrView below; to.copy_(found); }, true);
    return given;
  };
  for (size_t i = 0; i < returns.size(); i++) {
    auto source = call.source_of(returns[i]);
    each_tensor(left[i], [&](const Tensor& found) {
      if (!found.defined()) return found;
      if (source && call.given[*source].isTensor()) {
        Tensor was = call.given[*source].toTensor();
        if (!returns[i].alias_info()->isWrite()) {
          auto moved = static_cast<const char*>(found.const_data_ptr()) - real(was.const_data_ptr());
          auto offset = was.storage_offset() + moved / static_cast<int64_t>(was.element_size());
          return at::native::as_strided_tensorimpl(was, found.sizes(), found.strides(), offset);
        }
        if (was.sizes() == found.sizes() && was.numel()) return was;
        at::native::resize_output(was, found.sizes());
        return fill(found, was);
      }
      return fill(found, make(found.sizes(), found.strides(), found.scalar_type()));
    });
  }
  return left;
}

// What ``op`` does, whatever it is; takes its arguments from the stack and leaves its results there.
void call_on_the_cpu(Call& call, torch::jit::Stack* stack) {
  raise_failure();
  std::optional<torch::jit::Stack> results;
  if (call.resizes && !call.hands_over) call.make_room();
  if (!call.resizes && !call.hands_over) results = call.results();
  if (results) queue(call, *results);
  else results = wait_for(call);
  for (auto& result : *results) stack->push_back(std::move(result));
}

// Whole numbers are counted here, too, as on a GPU.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& from, const at::Scalar& to) {
  Tensor found = make({bins}, {1}, self.scalar_type());
  issue_kernel([host = for_stream(self), left = for_stream(found), bins, from, to] {
    at::AutoDispatchBelowADInplaceOrView below;
    left.copy_(at::histc(host.to(at::kFloat), bins, from, to));
  }, false);
  return found;
}

// The CPU's draws from a generator that it is not given.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& self, double p, std::optional<bool> train) {
  Tensor found = make(self.sizes(), self.strides(), self.scalar_type()), mask = make(self.sizes(), self.strides(), at::kBool);
  double kept = train.value_or(true) ? 1 - p : 1;
  issue_kernel([host = for_stream(self), left = for_stream(found), drawn = for_stream(mask), kept, seed = next_seed(IValue())] {
    at::AutoDispatchBelowADInplaceOrView below;
    drawn.bernoulli_(kept, at::detail::createCPUGenerator(seed));
    left.copy_(host.mul(drawn).mul_(kept == 0 ? 0 : 1 / kept));
  }, false);
  return {found, mask};
}
}  // namespace
