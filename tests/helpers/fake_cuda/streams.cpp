// Streams and events. A stream is a thread with a queue; the default stream of each device is one of them, too.
#include <array>
#include <vector>

#include "runtime.h"

namespace fake {
namespace {
std::mutex streams_m;
std::array<std::vector<Stream*>, MOST_DEVICES> streams;  // of each device, its default stream first

Stream& default_of(int device) {
  Lock lock(streams_m);
  if (streams[device].empty()) streams[device].push_back(new Stream(device));  // its thread runs to the end of the process
  return *streams[device][0];
}

struct Event {
  int device;
  unsigned flags;
  std::mutex m;
  std::shared_ptr<Point> point;
  std::shared_ptr<Point> last() { Lock lock(m); return point; }
};
Event& event_of(cudaEvent_t given) { return *reinterpret_cast<Event*>(given); }
}  // namespace

Stream& stream_of(cudaStream_t given) {
  bool named = given && given != cudaStreamLegacy && given != cudaStreamPerThread;
  return named ? *reinterpret_cast<Stream*>(given) : default_of(current_device);
}

void sync_device(int device) {
  default_of(device);
  std::vector<Stream*> all;
  { Lock lock(streams_m); all = streams[device]; }
  for (Stream* one : all) one->sync();
}
}  // namespace fake
using namespace fake;

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int) {
  if (!(flags & cudaStreamNonBlocking)) complain("a stream that waits for the default stream: here it does not");
  default_of(current_device);
  auto* stream = new Stream(current_device);
  Lock lock(streams_m);
  streams[current_device].push_back(stream);
  *made = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t* made) { return cudaStreamCreateWithPriority(made, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t given) {
  stream_of(given).sync();
  return after_wait();
}
API cudaError_t cudaStreamQuery(cudaStream_t given) { return stream_of(given).idle() ? cudaSuccess : cudaErrorNotReady; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t given, cudaEvent_t event, unsigned) {
  if (auto point = event_of(event).last()) stream_of(given).push([point] { point->wait(); });
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t given, cudaHostFn_t work, void* data) {
  stream_of(given).push([=] { work(data); });
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t given, cudaStreamCallback_t work, void* data, unsigned) {
  stream_of(given).push([=] { work(given, cudaSuccess, data); });
  return cudaSuccess;
}
// Nothing is ever captured into a graph.
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                         const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned flags) {
  count("events");
  *made = reinterpret_cast<cudaEvent_t>(new Event{current_device, flags});
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { delete &event_of(event); return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t given, cudaStream_t on) {
  Event& event = event_of(given);
  Stream& stream = stream_of(on);
  if (event.device != stream.device) return fail(cudaErrorInvalidResourceHandle, "an event is recorded on another device");
  Lock lock(event.m);
  event.point = record(stream);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t on, unsigned) { return cudaEventRecord(event, on); }
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto point = event_of(event).last();
  return !point || point->query() ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (auto point = event_of(event).last()) point->wait();
  return after_wait();
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  Event &first = event_of(from), &second = event_of(to);
  if ((first.flags | second.flags) & cudaEventDisableTiming)
    return fail(cudaErrorInvalidResourceHandle, "the time between events that keep none");
  auto begin = first.last(), end = second.last();
  if (!begin || !end) return fail(cudaErrorInvalidResourceHandle, "the time between events that were not recorded");
  if (!begin->query() || !end->query()) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
  return cudaSuccess;
}

// --- for kernels.cpp and the tests

// Queue a kernel on ``given``, which is to be a stream of the current device.
API void fake_push(cudaStream_t given, Task* task, bool is_kernel) {
  Stream& stream = stream_of(given);
  if (stream.device != current_device) complain("a kernel on a stream of another device");
  stream.push([&stream, is_kernel, task = std::move(*task)] {
    if (is_kernel) stream.linger(longest_kernel_us, 8);
    task();
  });
}
// The longest random delays, in microseconds.
API void fake_delay(int copies_us, int kernels_us) {
  longest_copy_us = copies_us;
  longest_kernel_us = kernels_us;
}
// How much longer each piece of work on one stream takes, in microseconds.
API void fake_slow(cudaStream_t given, int us) { stream_of(given).slow_us = us; }
