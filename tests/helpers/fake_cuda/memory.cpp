// Memory of the devices, registered memory of the host, and copies.
#include <algorithm>
#include <array>
#include <cstring>

#include "runtime.h"

namespace fake {
namespace {
constexpr size_t ALIGN = 512, GRANULARITY = size_t(2) << 20, PAGE = 4096, POISONED = size_t(64) << 20;
const size_t CONTEXT = setting("FAKE_CUDA_CONTEXT_BYTES", size_t(500) << 20);  // what a GPU's context takes

struct Block { size_t size; int device; };
std::mutex memory_m;
std::map<char*, Block> blocks;  // by address
std::multimap<size_t, char*> freed;  // addresses by size
std::map<void*, size_t> pinned;  // cudaHostAlloc's
size_t top = 0;
std::array<size_t, MOST_DEVICES> used{}, limits{};

size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }
size_t limit_of(int device) {
  return limits[device] ? limits[device] : setting("FAKE_CUDA_BYTES", size_t(6) << 30);
}

char* addresses(size_t size) {
  auto found = freed.find(size);
  if (found != freed.end()) {
    char* again = found->second;
    freed.erase(found);
    return again;
  }
  if (top + size > SPACE) return nullptr;
  return forbidden + std::exchange(top, rounded(top + size, ALIGN));
}

bool takes(int device, size_t size) {
  if (used[device] + size + CONTEXT > limit_of(device)) return false;
  used[device] += size;
  return true;
}

// Whoever reads what nobody has written reads NaN, or -1; of large blocks only in the beginning, which is faster.
void poison(char* address, size_t size) { memset(real(address), 0xFF, std::min(size, POISONED)); }

void vacate(char* address, size_t size) { madvise(real(address), size / PAGE * PAGE, MADV_DONTNEED); }

cudaError_t copy(void* to, const void* from, size_t size, cudaStream_t on, bool waits) {
  if (!size) return cudaSuccess;
  bool up = is_device(to), down = is_device(from);
  for (auto [address, there] : {std::pair<const void*, bool>{to, up}, {from, down}})
    if (there && owner_of(address, size) < 0) return fail(cudaErrorInvalidValue, "a copy leaves the memory of the device");
  Stream& stream = stream_of(on);
  const void* host = up && down ? nullptr : up ? from : to;
  if (host && !is_registered(host, size)) {
    if (num_touched(host, size))
      return fail(cudaErrorInvalidValue, "a copy lies partly in registered memory, or in two registrations");
    waits = true;
  }
  count(waits ? "sync_copies" : "async_copies");
  auto noted = host ? begin_copy(host, size) : UnderWay();
  stream.push([=, &stream] {
    stream.linger(longest_copy_us);
    memmove(up ? real(to) : to, down ? real(from) : from, size);
    if (host) end_copy(noted);
  });
  if (!waits) return cudaSuccess;
  stream.sync();
  return after_wait();
}
}  // namespace

int owner_of(const void* address, size_t size) {
  auto* at = static_cast<const char*>(address);
  Lock lock(memory_m);
  auto found = blocks.upper_bound(const_cast<char*>(at));
  if (found == blocks.begin()) return -1;
  int device = (--found)->second.device;
  for (const char* end = at + size; at < end; ++found) {  // segments that expand are several blocks
    if (found == blocks.end() || at < found->first || at >= found->first + found->second.size) return -1;
    at = found->first + found->second.size;
  }
  return device;
}
}  // namespace fake
using namespace fake;

API cudaError_t cudaMalloc(void** made, size_t wanted) {
  size_t size = rounded(wanted, ALIGN);
  Lock lock(memory_m);
  *made = nullptr;
  if (!takes(current_device, size)) return fail(cudaErrorMemoryAllocation);
  char* address = addresses(size);
  if (!address) return fail(cudaErrorMemoryAllocation, "no addresses are left");
  blocks[address] = {size, current_device};
  poison(address, size);
  *made = address;
  return cudaSuccess;
}
API cudaError_t cudaFree(void* given) {
  if (!given) return cudaSuccess;
  int device = owner_of(given, 1);
  if (device < 0) return fail(cudaErrorInvalidValue, "memory is freed that nobody has");
  sync_device(device);
  Lock lock(memory_m);
  auto found = blocks.find(static_cast<char*>(given));
  if (found == blocks.end()) return fail(cudaErrorInvalidValue, "memory is freed from its middle on");
  auto [address, block] = *found;
  used[block.device] -= block.size;
  vacate(address, block.size);
  freed.emplace(block.size, address);
  blocks.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaMallocAsync(void** made, size_t size, cudaStream_t) { return cudaMalloc(made, size); }
API cudaError_t cudaFreeAsync(void* given, cudaStream_t) { return cudaFree(given); }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(memory_m);
  size_t limit = limit_of(current_device);
  *total = limit;
  *free = limit - std::min(limit, CONTEXT + used[current_device]);
  return cudaSuccess;
}
// How much memory a device has, its context included; 0: as the environment says.
API void fake_limit(int device, size_t size) {
  Lock lock(memory_m);
  limits.at(device) = size;
}
// Where the threads of the streams find what lies at a device address.
API void* fake_real(const void* address) { return is_device(address) ? real(address) : const_cast<void*>(address); }

// --- expandable segments of torch's allocator: addresses first, memory for parts of them later

struct Physical { size_t size; int device; };
API CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *size = GRANULARITY;
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr* made, size_t size, size_t, CUdeviceptr, unsigned long long) {
  Lock lock(memory_m);
  char* address = addresses(size);
  *made = reinterpret_cast<CUdeviceptr>(address);
  return address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAddressFree(CUdeviceptr given, size_t size) {
  Lock lock(memory_m);
  freed.emplace(size, reinterpret_cast<char*>(given));
  return CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle* made, size_t size, const CUmemAllocationProp* of, unsigned long long) {
  Lock lock(memory_m);
  if (!takes(of->location.id, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *made = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{size, of->location.id});
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle given) {
  auto* physical = reinterpret_cast<Physical*>(given);
  Lock lock(memory_m);
  used[physical->device] -= physical->size;
  delete physical;
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr at, size_t size, size_t, CUmemGenericAllocationHandle given, unsigned long long) {
  auto* address = reinterpret_cast<char*>(at);
  Lock lock(memory_m);
  blocks[address] = {size, reinterpret_cast<Physical*>(given)->device};
  poison(address, size);
  return CUDA_SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  auto* address = reinterpret_cast<char*>(at);
  int device = owner_of(address, size);
  if (device < 0) return CUDA_ERROR_INVALID_VALUE;
  sync_device(device);
  Lock lock(memory_m);
  blocks.erase(blocks.lower_bound(address), blocks.lower_bound(address + size));
  vacate(address, size);
  return CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

// --- memory of the host

API cudaError_t cudaHostRegister(void* given, size_t size, unsigned) {
  if (!given || !size) return fail(cudaErrorInvalidValue, "nothing is registered");
  auto begin = reinterpret_cast<uintptr_t>(given);
  if (begin % PAGE) complain("memory is registered from the middle of a page on");
  for (auto at = begin / PAGE * PAGE; at < begin + size; at += PAGE) (void)*reinterpret_cast<volatile char*>(at);  // pages must be there
  if (int error = host_register(begin, size)) return fail(static_cast<cudaError_t>(error), "memory is registered twice");
  count("registrations");
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* given) {
  int error = host_unregister(reinterpret_cast<uintptr_t>(given));
  return error ? fail(static_cast<cudaError_t>(error), "memory is unregistered that is not registered") : cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** made, size_t wanted, unsigned) {
  size_t size = std::max(PAGE, rounded(wanted, PAGE));
  *made = aligned_alloc(PAGE, size);
  if (!*made) return fail(cudaErrorMemoryAllocation);
  host_register(reinterpret_cast<uintptr_t>(*made), size);
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* given) {
  if (!given) return cudaSuccess;
  for (int device = 0; device < NUM_DEVICES; device++) sync_device(device);
  if (host_unregister(reinterpret_cast<uintptr_t>(given))) return fail(cudaErrorInvalidValue, "host memory is freed that nobody has");
  free(given);
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* given) {
  *found = {};
  found->device = current_device;
  if (is_device(given)) {
    found->type = cudaMemoryTypeDevice;
    found->device = owner_of(given, 1);
    found->devicePointer = const_cast<void*>(given);
  } else if (is_registered(given, 1)) {
    found->type = cudaMemoryTypeHost;
    found->hostPointer = found->devicePointer = const_cast<void*>(given);
  }
  return cudaSuccess;
}

// --- copies

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t on) {
  return copy(to, from, size, on, false);
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) { return copy(to, from, size, 0, true); }
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t on) {
  return copy(to, from, size, on, false);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_row, const void* from, size_t from_row, size_t width, size_t rows,
                                  cudaMemcpyKind, cudaStream_t on) {
  for (size_t row = 0; row < rows; row++)
    if (auto error = copy(static_cast<char*>(to) + row * to_row, static_cast<const char*>(from) + row * from_row, width, on, false))
      return error;
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t on) {
  if (owner_of(to, size) < 0) return fail(cudaErrorInvalidValue, "memory is set that nobody has");
  stream_of(on).push([=] { memset(real(to), value, size); });
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* to, int value, size_t size) {
  if (auto error = cudaMemsetAsync(to, value, size, 0)) return error;
  return cudaStreamSynchronize(0);
}
