// What the devices are, errors, counts, and kernels: of which none is computed here (kernels.cpp does).
#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "runtime.h"

namespace fake {
size_t setting(const char* name, size_t otherwise) {
  const char* given = getenv(name);
  return given ? strtoull(given, nullptr, 0) : otherwise;
}

thread_local int current_device = 0;
namespace {
thread_local cudaError_t last_error = cudaSuccess, explained = cudaSuccess;
thread_local std::string why_explained;
std::mutex counts_m;
std::map<std::string, long> counts, complaints;

// Lines of "number what".
const char* lines(const std::map<std::string, long>& of) {
  static thread_local std::string found;
  found.clear();
  for (auto& [what, number] : of) found += std::to_string(number) + " " + what + "\n";
  return found.c_str();
}

// The operators: as soon as torch asks for devices its libraries are there, and its kernels can be replaced.
void load_kernels() {
  static std::once_flag once;
  if (dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD))
    std::call_once(once, [] {
      if (dlopen("libfake_kernels.so", RTLD_NOW)) return;
      fprintf(stderr, "[fake CUDA] %s\n", dlerror());
      abort();
    });
}
}  // namespace

void count(const std::string& what) {
  Lock lock(counts_m);
  ++counts[what];
}

void complain(const std::string& what) {
  Lock lock(counts_m);
  if (complaints[what]++) return;
  fprintf(stderr, "[fake CUDA] %s\n", what.c_str());
  if (!setting("FAKE_CUDA_TRACE", 0)) return;
  void* frames[40];
  backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
}

cudaError_t fail(cudaError_t error, const std::string& why) {
  last_error = explained = error;
  why_explained = why;
  if (!why.empty()) complain(why);
  return error;
}

cudaError_t after_wait() {
  std::string what = take_failure();
  if (what.empty()) return cudaSuccess;
  last_error = explained = cudaErrorLaunchFailure;
  why_explained = what;
  return last_error;
}
}  // namespace fake
using namespace fake;

API const char* fake_counts() {
  Lock lock(counts_m);
  counts["registered"] = [] { Lock host(host_m); return registered.size(); }();
  return lines(counts);
}
API const char* fake_complaints() { Lock lock(counts_m); return lines(complaints); }
API void fake_count(const char* what) { count(what); }
API void fake_complain(const char* what) { complain(what); }
// What went wrong in a stream, until now, or null.
API const char* fake_failure() {
  static thread_local std::string found;
  found = take_failure();
  return found.empty() ? nullptr : found.c_str();
}

API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t error) {
  static thread_local std::string found;
  return (found = "cudaError " + std::to_string(error)).c_str();
}
API const char* cudaGetErrorString(cudaError_t error) {
  static thread_local std::string found;
  found = error == cudaErrorMemoryAllocation ? "out of memory" : "fake CUDA: error " + std::to_string(error);
  if (error == explained && !why_explained.empty()) found += ": " + why_explained;
  return found.c_str();
}

API cudaError_t cudaGetDeviceCount(int* number) {
  load_kernels();
  *number = NUM_DEVICES;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) { *device = current_device; return cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= NUM_DEVICES) return fail(cudaErrorInvalidDevice, "there is no such device");
  current_device = device;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  sync_device(current_device);
  return after_wait();
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { *version = 13000; return cudaSuccess; }

// An H200's.
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  if (device < 0 || device >= NUM_DEVICES) return fail(cudaErrorInvalidDevice, "there is no such device");
  *found = {};
  strcpy(found->name, "NVIDIA H200");
  size_t free;
  int former = std::exchange(current_device, device);
  cudaMemGetInfo(&free, &found->totalGlobalMem);
  current_device = former;
  found->major = 9;
  found->multiProcessorCount = 132;
  found->warpSize = 32;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->maxGridSize[0] = 0x7fffffff;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->sharedMemPerMultiprocessor = 233472;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->l2CacheSize = 60 << 20;
  found->memoryBusWidth = 6144;
  found->textureAlignment = 512;
  found->asyncEngineCount = 3;
  found->unifiedAddressing = found->concurrentKernels = found->canMapHostMemory = found->hostRegisterSupported = 1;
  found->pciBusID = device;
  memset(found->uuid.bytes, device + 1, sizeof found->uuid.bytes);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  cudaDeviceProp found;
  if (auto error = cudaGetDeviceProperties(&found, device)) return error;
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: *value = found.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = found.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = found.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = found.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = found.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(found.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(found.sharedMemPerBlockOptin); break;
    case cudaDevAttrWarpSize: *value = found.warpSize; break;
    case cudaDevAttrL2CacheSize: *value = found.l2CacheSize; break;
    case cudaDevAttrPageableMemoryAccess: *value = 0; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  snprintf(id, size, "0000:%02x:00.0", device);
  return cudaSuccess;
}

// --- kernels: which there are is known, and that none of them was replaced is an error

namespace {
std::mutex kernels_m;
std::map<const void*, std::string>& kernels() {  // filled before this file's own variables are
  static auto* found = new std::map<const void*, std::string>();
  return *found;
}
struct Configuration { dim3 grid, block; size_t shared; cudaStream_t stream; };
thread_local Configuration configured;

cudaError_t launched(const void* kernel) {
  std::string name = "?";
  { Lock lock(kernels_m); if (auto found = kernels().find(kernel); found != kernels().end()) name = found->second; }
  char* readable = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, nullptr);
  if (readable) name = readable;
  free(readable);
  return fail(cudaErrorNotSupported, "a kernel that the CPU has not: " + name.substr(0, 300));
}
}  // namespace
API void** __cudaRegisterFatBinary(void*) { static void* handle[1]; return handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 0; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* kernel, char* name, const char*, int, void*, void*, void*, void*, int*) {
  Lock lock(kernels_m);
  kernels()[kernel] = name;
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configured = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configured.grid;
  *block = configured.block;
  *shared = configured.shared;
  *static_cast<cudaStream_t*>(stream) = configured.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* found, const void* kernel) {
  *found = reinterpret_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launched(kernel); }
API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launched(kernel); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) { return launched(kernel); }
API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launched(kernel);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  *found = {};
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* number, const void*, int, size_t) {
  *number = 2;
  return cudaSuccess;
}
