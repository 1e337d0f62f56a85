// What the sources of the fake runtime share; README.md says what it is.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

#include "../simulated/memory.h"

#define API extern "C" __attribute__((visibility("default")))

namespace fake {
using namespace hosted;

// A whole number from the environment.
size_t setting(const char* name, size_t otherwise);

constexpr int MOST_DEVICES = 8;
const int NUM_DEVICES = static_cast<int>(setting("FAKE_CUDA_DEVICES", 1));
extern thread_local int current_device;

// How often something happened; ``fake_counts`` shows them.
void count(const std::string& what);

// Something that a GPU refuses, or that costs what its author did not mean to pay; said once, and counted.
void complain(const std::string& what);

// ``error``, which cudaGetLastError then shows.
cudaError_t fail(cudaError_t error, const std::string& why = "");

// What a call returns that has waited: the error of a kernel or of a copy, once.
cudaError_t after_wait();

Stream& stream_of(cudaStream_t given);
void sync_device(int device);

// Whether all bytes from an address on are of memory that somebody has, and of which device; -1 if not.
int owner_of(const void* address, size_t size);
}  // namespace fake
