// Torch's operators for CUDA by the CPU's kernels, queued on the streams of the fake runtime.
//
// Every operator that has a kernel for CUDA and one for the CPU gets another one for CUDA, which runs the CPU's: so there
// is no list of operators but of those that are kept or are written here. The runtime loads this library as soon as torch
// asks how many devices there are.
#include "kernels.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/Copy.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/copy_native.h>
#include <torch/csrc/jit/codegen/fuser/interface.h>
#include <torch/library.h>

namespace fake {
void replace_attention(torch::Library& library);
}

namespace {
using namespace fake;

// The next numbers of CUDA's generator, which counts on the host; the CPU's draw from a generator with this seed.
uint64_t next_seed(const c10::IValue& given) {
  auto generator = given.isGenerator() ? given.toGenerator() : at::cuda::detail::getDefaultCUDAGenerator();
  auto* philox = at::check_generator<at::CUDAGeneratorImpl>(generator);
  Lock lock(philox->mutex_);
  auto [seed, offset] = philox->philox_engine_inputs(4);
  return seed * 6364136223846793005u + offset;
}
}  // namespace

#include "../simulated/fallback.h"

namespace {
// The one device of the arguments, as torch's own kernels take it.
c10::Device device_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  std::optional<c10::Device> found;
  for (auto value = stack.end() - static_cast<int64_t>(op.schema().arguments().size()); value != stack.end(); ++value) {
    if (value->isDevice() && value->toDevice().is_cuda() && value->toDevice().has_index()) found = value->toDevice();
    for (const auto& one : tensors_of(*value)) {
      if (!on_device(one)) continue;
      TORCH_CHECK(!found || *found == one.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                  *found, " and ", one.device(), "! (", op.schema().name(), ")");
      found = one.device();
    }
  }
  return found.value_or(c10::Device(c10::kCUDA, c10::cuda::current_device()));
}

// Whether a GPU, too, waits: a size or a number depends on values, or indexes come from the host.
bool waits_on_a_gpu(const c10::OperatorHandle& op, const Call& call) {
  if (call.indexes_from_host) return true;
  const std::string& name = op.schema().name();
  if (name == "aten::index" || name.find("index_put") != std::string::npos) {  // by numbers nothing depends on values
    for (const auto& index : tensors_of(call.given[1]))
      if (index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte)) return true;
    return false;
  }
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::cuda::CUDAGuard guard(device_of(op, *stack));
  Call call(op, stack);
  if (waits_on_a_gpu(op, call) && c10::cuda::warning_state().get_sync_debug_mode() != c10::cuda::SyncDebugMode::L_DISABLED)
    c10::cuda::warn_or_error_on_sync();
  call_on_the_cpu(call, stack);
}

// Within a device a kernel; between devices, and between a device and the host, torch's own calls of the runtime.
Tensor& copy_(Tensor& self, const Tensor& given, bool non_blocking) {
  if (on_device(self) && on_device(given) && self.device() == given.device()) {
    c10::cuda::CUDAGuard guard(self.device());
    raise_failure();
    Tensor from = given.expand_as(self);
    if (self.numel() == 0 || self.is_same(given)) return self;
    issue_kernel([from = for_stream(from), to = for_stream(self)] { at::AutoDispatchBelowADInplaceOrView below; to.copy_(from); }, false);
    return self;
  }
  const Tensor& host = on_device(self) ? given : self;
  if (non_blocking && host.is_cpu() && host.numel() && !host.is_pinned())
    fake_complain("an asynchronous copy from or to pageable memory: the host waits for it");
  return at::native::copy_(self, given, non_blocking);
}

// ``kernel`` of ``given``, contiguous and of another type than the CPU's kernel makes of it.
template <class Kernel> Tensor retyped(const Tensor& given, c10::ScalarType dtype, Kernel kernel) {
  c10::cuda::CUDAGuard guard(given.device());
  Tensor found = at::empty(given.sizes(), given.options().dtype(dtype));
  issue_kernel([kernel, from = for_stream(given), to = for_stream(found)] {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(kernel(from));
  }, false);
  return found;
}
// Fp16 becomes fp32 on its way, and its gradient fp16.
template <Tensor (*kernel)(const Tensor&, int64_t, bool)> Tensor softmax(const Tensor& self, int64_t dim, bool half_to_float) {
  auto dtype = half_to_float ? at::kFloat : self.scalar_type();
  return retyped(self, dtype, [=](const Tensor& from) { return kernel(from.to(dtype), dim, false); });
}
template <Tensor (*kernel)(const Tensor&, const Tensor&, int64_t, c10::ScalarType)>
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, c10::ScalarType dtype) {
  return retyped(grad, dtype, [=, made = for_stream(output)](const Tensor& from) { return kernel(from, made, dim, from.scalar_type()); });
}

// Torch's own, which compute nothing, or only call the runtime.
const std::set<std::string> KEPT{
    "_fused_sdp_choice", "_local_scalar_dense", "_pin_memory", "_reshape_alias", "as_strided", "empty.memory_format", "empty_strided", "is_pinned",
    "is_set_to", "record_stream", "resize_", "set_", "set_.source_Storage", "set_.source_Storage_storage_offset",
    "set_.source_Tensor", "unfold", "view", "view.dtype", "view_as_complex", "view_as_real", "_efficientzerotensor"};
// Torch's own for CUDA are not the dispatcher's, or choose among libraries of CUDA's.
const char* const MORE[] = {"equal", "convolution", "convolution_backward"};

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

int replace() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  Quiet quiet;  // torch warns that its kernels are replaced
  c10::WarningUtils::WarningHandlerGuard silent(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  auto on_the_cpu = [&](const std::string& name) { library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>()); };
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    std::string short_name = name.name.substr(name.name.find("::") + 2) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    auto op = dispatcher.findSchema(name);
    if (name.name.rfind("aten::", 0) || KEPT.count(short_name) || !op) continue;
    using Key = c10::DispatchKey;
    for (auto key : {Key::CPU, Key::CompositeExplicitAutograd, Key::CompositeImplicitAutograd, Key::CompositeExplicitAutogradNonFunctional})
      if (op->hasKernelForDispatchKey(key)) { on_the_cpu(short_name); break; }
  }
  for (auto name : MORE) on_the_cpu(name);
  library.impl("copy_", copy_);
  library.impl("histc", histc);
  library.impl("native_dropout", native_dropout);
  library.impl("_softmax", softmax<at::_softmax>);
  library.impl("_log_softmax", softmax<at::_log_softmax>);
  library.impl("_softmax_backward_data", softmax_backward<at::_softmax_backward_data>);
  library.impl("_log_softmax_backward_data", softmax_backward<at::_log_softmax_backward_data>);
  replace_attention(library);
  torch::jit::overrideCanFuseOnGPU(false);  // TorchScript would compile kernels of its own
  return 0;
}
const int replaced = replace();
}  // namespace
