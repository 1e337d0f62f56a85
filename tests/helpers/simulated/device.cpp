// A device of torch's kind PrivateUse1, simulated in host memory: as asynchronous as a GPU, and less forgiving.
//
// Memory. Tensors hold addresses in a range that nobody may touch; the same bytes are mapped a second time for the
// threads of the streams. So host code that follows a device address ends in a segmentation fault. Memory that is freed
// is filled with 0xFF (NaN, -1) on the stream that allocated it, and given out again at once, as by torch's caching
// allocator for CUDA: who is on another stream and did not say so reads NaN or somebody else's numbers.
//
// Streams are threads, each with a queue. Every kernel is the CPU's, run by the thread of the current stream on the
// second mapping; the caller goes on as soon as it is queued. Where the sizes of the results are not known beforehand,
// where random numbers are drawn or a number is handed to the host, the caller waits. Copies and kernels are delayed at
// random (``delay``), and those of one stream each by so much (``slow``): then it lags behind all others, and whoever
// relies on it without waiting fails. An error in a kernel is raised by the next call that waits.
//
// Host memory. A range is registered once (712 for a second time, 713 for one that is not), and no copy may lie partly
// in one. Copies of memory that is not registered make the caller wait. Who unregisters it under a copy gets an error.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <future>
#include <optional>
#include <set>

#include "memory.h"

namespace {
using namespace hosted;
using at::Tensor;
using c10::IValue;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr size_t ALIGN = 512;

std::atomic<int64_t> async_copies{0}, sync_copies{0}, async_kernels{0}, sync_kernels{0};

// --- streams ---------------------------------------------------------------------------------------------------------

void raise_failure() {
  std::string what = take_failure();
  TORCH_CHECK(what.empty(), "simulated device: ", what);
}

// The default stream and a pool that is handed out in turn, as torch does for CUDA.
constexpr int NUM_STREAMS = 33;
std::array<Stream*, NUM_STREAMS> streams{};
std::mutex streams_m;
std::atomic<int> next_stream{0};
thread_local int64_t current_stream = 0;

Stream& stream(int64_t id) {
  Lock lock(streams_m);
  if (!streams.at(id)) streams[id] = new Stream();  // never destroyed: its thread runs to the end of the process
  return *streams[id];
}

// Wait without the interpreter lock, which somebody whom we wait for may need.
template <class Wait> void on_host(Wait wait) {
  std::optional<py::gil_scoped_release> released;
  if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  wait();
}

void sync_all() {
  for (int id = 0; id < NUM_STREAMS; id++) {
    Stream* one;
    { Lock lock(streams_m); one = streams[id]; }
    if (one) one->sync();
  }
}

using Event = std::shared_ptr<Point>;

Event record(int64_t id) { return hosted::record(stream(id)); }

// --- device memory ---------------------------------------------------------------------------------------------------

struct Block { size_t size; int64_t stream; std::set<int64_t> others; };
std::mutex memory_m;
std::map<void*, Block> blocks;
std::map<std::pair<int64_t, size_t>, std::vector<void*>> freed;  // by the stream that allocated and the size
size_t top = 0, used = 0, peak = 0, limit = SPACE;

void release(void* address) {
  if (!address) return;
  Lock lock(memory_m);
  Block& block = blocks.at(address);
  used -= block.size;
  freed[{block.stream, block.size}].push_back(address);
  Stream& owner = stream(block.stream);
  for (int64_t other : block.others) owner.push([point = record(other)] { point->wait(); });
  block.others.clear();
  owner.push([address, size = block.size] { memset(real(address), 0xFF, size); });
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t wanted) override {
    c10::Device device(KIND, 0);
    if (!wanted) return {nullptr, nullptr, &release, device};
    size_t size = (wanted + ALIGN - 1) / ALIGN * ALIGN;
    Lock lock(memory_m);
    TORCH_CHECK_WITH(OutOfMemoryError, used + size <= limit && top + size <= SPACE, "simulated device out of memory. "
        "Tried to allocate ", size, " bytes; ", limit, " in all, ", used, " in use.");
    auto& list = freed[{current_stream, size}];
    void* address = nullptr;
    if (!list.empty()) { address = list.back(); list.pop_back(); }
    else { address = forbidden + top; top += size; blocks[address] = {size, current_stream, {}}; }
    used += size;
    peak = std::max(peak, used);
    return {address, address, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memmove(real(to), real(from), size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream on) override {
    Lock lock(memory_m);
    auto found = blocks.find(data.get());
    if (found != blocks.end() && on.id() != found->second.stream) found->second.others.insert(on.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    Lock lock(memory_m);
    for (auto* found : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*found)[0].current = static_cast<int64_t>(used);
      (*found)[0].peak = static_cast<int64_t>(peak);
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { Lock lock(memory_m); peak = used; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { Lock lock(memory_m); return {limit - used, limit}; }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(KIND, &device_memory);

// --- host memory -----------------------------------------------------------------------------------------------------

struct PinnedMemory final : c10::Allocator {
  static void drop(void* begin) {
    host_unregister(reinterpret_cast<uintptr_t>(begin));
    free(begin);
  }
  c10::DataPtr allocate(size_t wanted) override {
    size_t size = std::max(ALIGN, (wanted + ALIGN - 1) / ALIGN * ALIGN);
    void* begin = aligned_alloc(ALIGN, size);
    host_register(reinterpret_cast<uintptr_t>(begin), size);
    return {begin, begin, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
PinnedMemory pinned_memory;

// --- what torch asks of a device -------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using S = c10::Stream;
  static Device only() { return Device(KIND, 0); }
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device) const override { return only(); }
  Device getDevice() const override { return only(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  S getStream(Device) const override { return S(S::UNSAFE, only(), current_stream); }
  S getDefaultStream(Device) const override { return S(S::UNSAFE, only(), 0); }
  S getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  S getNewStream(Device, int) const override { return S(S::UNSAFE, only(), 1 + next_stream++ % (NUM_STREAMS - 1)); }
  S exchangeStream(S to) const override { return S(S::UNSAFE, only(), std::exchange(current_stream, to.id())); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static Event& event(void* held) { return *static_cast<Event*>(held); }
  void destroyEvent(void* held, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(held); }
  void record(void** held, const S& on, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*held) *held = new Event();
    event(*held) = ::record(on.id());
  }
  void block(void* held, const S& on) const override {
    if (held) stream(on.id()).push([point = event(held)] { point->wait(); });
  }
  bool queryEvent(void* held) const override { return !held || event(held)->query(); }
  void synchronizeEvent(void* held) const override {
    if (held) on_host([&] { event(held)->wait(); });
    raise_failure();
  }
  bool queryStream(const S& on) const override { return stream(on.id()).idle(); }
  void synchronizeStream(const S& on) const override { on_host([&] { stream(on.id()).sync(); }); raise_failure(); }
  void synchronizeDevice(c10::DeviceIndex) const override { on_host(sync_all); raise_failure(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const S& on) const override { device_memory.recordStream(data, on); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(first) && queryEvent(second), "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(event(second)->at - event(first)->at).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* begin) const override { return is_registered(begin, 1); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Device getDeviceFromPtr(void*) const override { return Guard::only(); }
  // The device draws its numbers by the CPU's kernels from a generator of its own.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto generator = at::detail::createCPUGenerator();
    return generator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto to = device_memory.allocate(size);
    size_t kept = std::min(size, storage.nbytes());
    stream(current_stream).push([to = to.get(), from = storage.data(), kept] { if (kept) memcpy(real(to), real(from), kept); });
    auto& changed = const_cast<c10::Storage&>(storage);
    changed.set_data_ptr_noswap(std::move(to));
    changed.set_nbytes(size);
  }
};
Hooks hooks;
}  // namespace

#include "kernels.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("init", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  module.def("generator", [] { return hooks.getDefaultGenerator(0); });
  module.def("host_register", &host_register);
  module.def("host_unregister", &host_unregister);
  module.def("for_stream", &for_stream);
  module.def("queue", [](py::function work) {  // on the current stream, whose thread takes the interpreter lock for it
    std::shared_ptr<py::function> held(new py::function(std::move(work)), [](py::function* one) {
      py::gil_scoped_acquire lock;
      delete one;
    });
    ++async_kernels;
    issue([held, id = current_stream] {
      stream(id).linger(longest_copy_us);
      py::gil_scoped_acquire lock;
      (*held)();
    }, false);
  });
  module.def("delay", [](int copies_us, int kernels_us) { longest_copy_us = copies_us; longest_kernel_us = kernels_us; });
  module.def("slow", [](int64_t id, int us) { stream(id).slow_us = us; });
  module.def("limit", [](size_t num_bytes) { Lock lock(memory_m); limit = num_bytes ? num_bytes : SPACE; });
  module.def("counts", [] {
    Lock lock(memory_m);
    return std::map<std::string, int64_t>{
        {"async_copies", async_copies}, {"sync_copies", sync_copies}, {"async_kernels", async_kernels},
        {"sync_kernels", sync_kernels}, {"bytes", int64_t(used)}, {"registered", int64_t(registered.size())}};
  });
  module.def("waited_for", [] {
    Lock lock(waited_m);
    return waited_for;
  });
}
