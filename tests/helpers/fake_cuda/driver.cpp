// The driver: what torch looks up by name. It is in the same library as the runtime; what is not here says so and fails
// (build.py).
#include <dlfcn.h>

#include <cstring>

#include "runtime.h"
using namespace fake;

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) { *version = 13000; return CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int* number) { *number = NUM_DEVICES; return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
API CUresult cuDeviceGetName(char* name, int size, CUdevice) {
  strncpy(name, "NVIDIA H200", size);
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(which), device));
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) { return cuDevicePrimaryCtxRetain(context, 0); }
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* device) { *device = current_device; return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult, const char** text) { *text = "an error of the fake driver"; return CUDA_SUCCESS; }

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *found = dlsym(dlopen("libcuda.so.1", RTLD_LAZY), name);
  if (result) *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPoint(const char* name, void** found, unsigned long long flags,
                                        cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, found, 0, flags, result);
}
