// The operators of the simulated device; included by device.cpp alone.
#pragma once

namespace {
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
std::mutex waited_m;
std::map<std::string, int64_t> waited_for;  // which operators made the caller wait, and how often

// Their results have other sizes or types on the CPU than torch's kernels for sizes say.
const std::set<std::string> UNLIKE_META{"aten::native_batch_norm"};

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// The same elements for a kernel of the CPU, in the mapping of the streams.
Tensor for_stream(const Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(real(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

// Queue work on the current stream; with ``waits`` the caller stays until it is done, and gets its error.
void issue(Task task, bool waits) {
  if (!waits) {
    stream(current_stream).push(std::move(task));
    return;
  }
  auto done = std::make_shared<std::promise<void>>();
  stream(current_stream).push([task = std::move(task), done] {
    try { task(); done->set_value(); } catch (...) { done->set_exception(std::current_exception()); }
  });
  auto result = done->get_future();
  on_host([&] { result.wait(); stream(current_stream).sync(); });
  result.get();
  raise_failure();
}

// --- memory ----------------------------------------------------------------------------------------------------------

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory, KEYS, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory, KEYS, c10::dtype_or_default(dtype));
}
Tensor make(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype) {
  return empty_strided(size, stride, dtype, {}, {}, {});
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  size_t wanted = self.storage_offset() + c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(size));
  if (wanted * self.itemsize() > self.storage().nbytes()) hooks.resizePrivateUse1Bytes(self.storage(), wanted * self.itemsize());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
Tensor& set_storage_offset(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}
void record_stream(Tensor& self, at::Stream on) { device_memory.recordStream(self.storage().data_ptr(), on); }

// --- copies ----------------------------------------------------------------------------------------------------------

// One stretch of memory between host and device.
void copy_stretch(const Tensor& from, const Tensor& to, bool non_blocking) {
  const Tensor& host = from.is_cpu() ? from : to;
  size_t size = to.nbytes();
  if (!size) return;
  void* begin = host.data_ptr();
  bool pinned = is_registered(begin, size);
  TORCH_CHECK(pinned || !num_touched(begin, size), "simulated device: invalid argument: a copy lies partly in registered memory");
  bool waits = !(non_blocking && pinned);
  ++(waits ? sync_copies : async_copies);
  char* target = on_device(to) ? real(to.data_ptr()) : static_cast<char*>(to.data_ptr());
  const char* source = on_device(from) ? real(from.const_data_ptr()) : static_cast<const char*>(from.const_data_ptr());
  // Torch's pinned memory is not given out again before the copy is done; of a registered mapping nobody takes care.
  bool torchs = host.storage().data_ptr().get_deleter() == &PinnedMemory::drop;
  auto at = reinterpret_cast<uintptr_t>(begin);
  decltype(under_way)::iterator noted;
  { Lock lock(host_m); noted = under_way.emplace(at, size); }
  issue([target, source, size, noted, id = current_stream, kept = torchs ? host.storage() : c10::Storage()] {
    stream(id).linger(longest_copy_us);
    memcpy(target, source, size);
    Lock lock(host_m);
    under_way.erase(noted);
  }, waits);
}

Tensor copy_from(const Tensor& given, const Tensor& to, bool non_blocking) {
  raise_failure();
  Tensor from = given.expand_as(to);
  if (on_device(from) && on_device(to)) {
    ++async_kernels;
    issue([from = for_stream(from), to = for_stream(to)] { at::AutoDispatchBelowADInplaceOrView below; to.copy_(from); }, false);
  } else if (from.scalar_type() == to.scalar_type() && from.is_contiguous() && to.is_contiguous()) {
    copy_stretch(from, to, non_blocking);
  } else {  // as on CUDA: what is not a stretch becomes one, first where it comes from and then where it goes to
    Tensor stretch = from.to(to.scalar_type()).contiguous();
    if (to.is_contiguous()) {
      copy_stretch(stretch, to, non_blocking);
    } else {
      Tensor landed = at::empty(to.sizes(), to.options());
      copy_stretch(stretch, landed, false);
      to.copy_(landed);
    }
  }
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}
at::Scalar local_scalar(const Tensor& self) {
  at::Scalar found;
  issue([&found, one = for_stream(self)] { found = at::native::_local_scalar_dense_cpu(one); }, true);
  return found;
}

// --- every other operator: the CPU's kernel --------------------------------------------------------------------------

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

struct Call {
  const c10::OperatorHandle& op;
  torch::jit::Stack given, host;  // the arguments, and what the CPU's kernel gets
  bool draws = false, resizes = false, hands_over = false;

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
        TORCH_CHECK(one.dim() == 0 || indexes, "simulated device: ", op.schema().name(), " got a tensor of ", one.device());
        return one.clone();  // numbers of the host are read when the kernel is issued
      });
      if (host[i].isDevice()) host[i] = c10::Device(c10::kCPU);
    }
    draws = op.hasTag(at::Tag::nondeterministic_seeded);
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
    at::native::resize_(given[out].toTensor(), metas[0].toTensor().sizes(), std::nullopt);
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
    }
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &metas);
    } catch (const std::exception&) { return false; }
    return true;
  }
};

std::vector<Tensor> tensors_of(const IValue& value) {
  std::vector<Tensor> found;
  IValue copy = value;
  each_tensor(copy, [&](const Tensor& one) { found.push_back(one); return one; });
  return found;
}

// What a kernel draws comes from the device's generator, as if it were the CPU's own. Kernels that draw are waited for,
// so that nobody else draws meanwhile.
struct Drawing {
  at::Generator cpu = at::detail::getDefaultCPUGenerator(), ours = hooks.getDefaultGenerator(0);
  Tensor before = cpu.get_state();
  Drawing() { cpu.set_state(ours.get_state()); }
  ~Drawing() {
    ours.set_state(cpu.get_state());
    cpu.set_state(before);
  }
};

void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto kept = stack;  // torch before 2.13 lets go of the arguments before it copies results that are arguments
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

// Nobody waits: the results are there, their numbers come.
void queue(Call& call, const torch::jit::Stack& results) {
  ++async_kernels;
  std::vector<std::vector<Tensor>> to;
  for (const auto& result : results) {
    to.emplace_back();
    for (const auto& one : tensors_of(result)) to.back().push_back(one.defined() ? for_stream(one) : one);
  }
  issue([op = call.op, host = std::move(call.host), to, id = current_stream]() mutable {
    stream(id).linger(longest_kernel_us, 8);
    run(op, host);
    for (size_t i = 0; i < to.size(); i++) {
      auto found = tensors_of(host[i]);
      for (size_t j = 0; j < to[i].size(); j++) {
        if (!to[i][j].defined() || found[j].const_data_ptr() == to[i][j].const_data_ptr()) continue;
        TORCH_CHECK(found[j].sizes() == to[i][j].sizes() && found[j].scalar_type() == to[i][j].scalar_type(),
                    op.schema().name(), " has other results than was said beforehand");
        at::AutoDispatchBelowADInplaceOrView below;
        to[i][j].copy_(found[j]);
      }
    }
  }, false);
}

// The caller waits, and makes the results of what the kernel left.
torch::jit::Stack wait_for(Call& call) {
  ++sync_kernels;
  { Lock lock(waited_m); waited_for[call.op.schema().name()]++; }
  auto left = call.host;
  issue([&] {
    std::optional<Drawing> drawing;
    if (call.draws) drawing.emplace();
    run(call.op, left);
  }, true);
  const auto& returns = call.op.schema().returns();
  for (size_t i = 0; i < returns.size(); i++) {
    auto source = call.source_of(returns[i]);
    each_tensor(left[i], [&](const Tensor& found) {
      if (!found.defined()) return found;
      if (source && call.given[*source].isTensor()) {
        Tensor was = call.given[*source].toTensor();
        if (!returns[i].alias_info()->isWrite()) {
          int64_t offset = (static_cast<const char*>(found.const_data_ptr()) - real(was.const_data_ptr())) / int64_t(was.element_size());
          return at::native::as_strided_tensorimpl(was, found.sizes(), found.strides(), was.storage_offset() + offset);
        }
        if (was.sizes() == found.sizes() && was.numel()) return was;
        at::native::resize_(was, found.sizes(), std::nullopt);
        was.copy_(found);
        return was;
      }
      Tensor made = make(found.sizes(), found.strides(), found.scalar_type());
      issue([found, to = for_stream(made)] { at::AutoDispatchBelowADInplaceOrView below; to.copy_(found); }, true);
      return made;
    });
  }
  return left;
}

// Whole numbers are counted here, too, as on a GPU.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& from, const at::Scalar& to) {
  Tensor found = make({bins}, {1}, self.scalar_type());
  issue([host = for_stream(self), left = for_stream(found), bins, from, to] {
    at::AutoDispatchBelowADInplaceOrView below;
    left.copy_(at::histc(host.to(at::kFloat), bins, from, to));
  }, false);
  return found;
}

// What is dropped is drawn when the kernel runs, so that nobody waits; see ``_module`` for who asks what was drawn.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& self, double p, std::optional<bool> train) {
  Tensor found = make(self.sizes(), self.strides(), self.scalar_type()), mask = make(self.sizes(), self.strides(), at::kBool);
  double kept = train.value_or(true) ? 1 - p : 1;
  ++async_kernels;
  issue([host = for_stream(self), left = for_stream(found), drawn = for_stream(mask), kept] {
    at::AutoDispatchBelowADInplaceOrView below;
    drawn.bernoulli_(kept, hooks.getDefaultGenerator(0));
    left.copy_(host.mul(drawn).mul_(kept == 0 ? 0 : 1 / kept));
  }, false);
  return {found, mask};
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  raise_failure();
  Call call(op, stack);
  std::optional<torch::jit::Stack> results;
  if (call.resizes && !call.draws && !call.hands_over) call.make_room();
  if (!call.draws && !call.resizes && !call.hands_over) results = call.results();
  if (results) queue(call, *results);
  else results = wait_for(call);
  for (auto& result : *results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_offset);
  library.impl("record_stream", record_stream);
  library.impl("histc", histc);
  library.impl("native_dropout", native_dropout);
  // Torch would make these of others, of which the CPU's is waited for.
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("native_layer_norm_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
}  // namespace
