// What kernels.cpp and attention.cpp share: tensors of the fake CUDA for the CPU's kernels, and work for its streams.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <future>

#include "../simulated/streams.h"

extern "C" {
void fake_push(cudaStream_t, hosted::Task*, bool is_kernel);
void* fake_real(const void*);
void fake_count(const char*);
void fake_complain(const char*);
const char* fake_failure();
}

namespace fake {
using namespace hosted;
using at::Tensor;
constexpr const char* NAME = "fake CUDA";

inline bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

inline char* real(const void* address) { return static_cast<char*>(fake_real(address)); }  // the runtime's mapping

// The same elements for a kernel of the CPU, in the mapping of the streams.
inline Tensor for_stream(const Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), options);
  Tensor found = at::from_blob(real(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) found._set_conj(true);
  if (tensor.is_neg()) found._set_neg(true);
  return found;
}

inline Tensor make(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype) {
  return at::detail::empty_strided_cuda(size, stride, dtype, c10::Device(c10::kCUDA, c10::cuda::current_device()));
}

inline void raise_failure() {
  const char* what = fake_failure();
  TORCH_CHECK(!what, NAME, ": ", what);
}

// Queue work on the current stream; with ``waits`` the caller stays until it is done, and gets its error.
inline void issue(Task task, bool waits, bool is_kernel = false) {
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  auto done = std::make_shared<std::promise<void>>();
  if (waits) {
    task = [task = std::move(task), done] {
      try { task(); done->set_value(); } catch (...) { done->set_exception(std::current_exception()); }
    };
  }
  fake_push(stream, &task, is_kernel);
  if (!waits) return;
  done->get_future().get();
  raise_failure();
}

inline void issue_kernel(Task task, bool waits) {
  C10_CUDA_CHECK(cudaGetLastError());  // as every launch of torch's: an error that nobody has asked for shows now
  fake_count(waits ? "sync_kernels" : "async_kernels");
  issue(std::move(task), waits, true);
}
}  // namespace fake
