// The operators of the simulated device; included by device.cpp alone.
#pragma once

namespace {
constexpr const char* NAME = "simulated device";
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
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
  auto noted = begin_copy(begin, size);
  issue([target, source, size, noted, id = current_stream, kept = torchs ? host.storage() : c10::Storage()] {
    stream(id).linger(longest_copy_us);
    memcpy(target, source, size);
    end_copy(noted);
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

// What is drawn comes from the device's generator.
uint64_t next_seed(const IValue& given) {
  auto generator = given.isGenerator() ? given.toGenerator() : hooks.getDefaultGenerator(0);
  Lock lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

void issue_kernel(Task task, bool waits) {
  ++(waits ? sync_kernels : async_kernels);
  issue([task = std::move(task), waits, id = current_stream] {
    if (!waits) stream(id).linger(longest_kernel_us, 8);
    task();
  }, waits);
}
}  // namespace

#include "fallback.h"  // every other operator

namespace {
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, stack);
  call_on_the_cpu(call, stack);
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
