// NCCL of one rank, whose collectives copy on the caller's stream. More ranks are refused when they meet.
// Its header needs others that torch does not install, so what is used of it is written out.
#include "runtime.h"
using namespace fake;

namespace {
enum Result { SUCCESS = 0, UNHANDLED_CUDA_ERROR = 1, INVALID_USAGE = 5 };
struct Id { char internal[128]; };  // by value, so its size matters
using Communicator = void*;
using Type = int;
using Operation = int;
constexpr int VERSION = 22809;
constexpr int SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // bytes of int8, uint8, int32, ..., fp8
Result only(int ranks, Communicator* made) {
  if (ranks != 1) {
    complain("collectives of several ranks: the fake NCCL has one");
    return INVALID_USAGE;
  }
  *made = reinterpret_cast<Communicator>(1);
  return SUCCESS;
}
Result copied(const void* from, void* to, size_t count, Type type, cudaStream_t on) {
  if (from == to) return SUCCESS;
  return cudaMemcpyAsync(to, from, count * SIZES[type], cudaMemcpyDeviceToDevice, on) ? UNHANDLED_CUDA_ERROR : SUCCESS;
}
}  // namespace

API Result ncclGetVersion(int* version) { *version = VERSION; return SUCCESS; }
API Result ncclGetUniqueId(Id* id) { *id = {}; return SUCCESS; }
API Result ncclCommInitRank(Communicator* made, int ranks, Id, int) { return only(ranks, made); }
API Result ncclCommInitRankConfig(Communicator* made, int ranks, Id, int, void*) { return only(ranks, made); }
API Result ncclCommInitRankScalable(Communicator* made, int ranks, int, int, Id*, void*) { return only(ranks, made); }
API Result ncclCommSplit(Communicator, int, int, Communicator* made, void*) { return only(1, made); }
API Result ncclCommCount(Communicator, int* ranks) { *ranks = 1; return SUCCESS; }
API Result ncclCommUserRank(Communicator, int* rank) { *rank = 0; return SUCCESS; }
API Result ncclCommGetAsyncError(Communicator, Result* error) { *error = SUCCESS; return SUCCESS; }
API Result ncclCommFinalize(Communicator) { return SUCCESS; }
API Result ncclCommDestroy(Communicator) { return SUCCESS; }
API Result ncclCommAbort(Communicator) { return SUCCESS; }
API Result ncclCommRegister(Communicator, void*, size_t, void** handle) { *handle = nullptr; return SUCCESS; }
API Result ncclCommDeregister(Communicator, void*) { return SUCCESS; }
API Result ncclGroupStart() { return SUCCESS; }
API Result ncclGroupEnd() { return SUCCESS; }
API const char* ncclGetErrorString(Result) { return "an error of the fake NCCL"; }
API const char* ncclGetLastError(Communicator) { return "collectives of several ranks: the fake NCCL has one"; }

API Result ncclAllReduce(const void* from, void* to, size_t count, Type type, Operation, Communicator, cudaStream_t on) {
  return copied(from, to, count, type, on);
}
API Result ncclReduce(const void* from, void* to, size_t count, Type type, Operation, int, Communicator, cudaStream_t on) {
  return copied(from, to, count, type, on);
}
API Result ncclReduceScatter(const void* from, void* to, size_t count, Type type, Operation, Communicator, cudaStream_t on) {
  return copied(from, to, count, type, on);
}
API Result ncclBroadcast(const void* from, void* to, size_t count, Type type, int, Communicator, cudaStream_t on) {
  return copied(from, to, count, type, on);
}
API Result ncclBcast(void*, size_t, Type, int, Communicator, cudaStream_t) { return SUCCESS; }
API Result ncclAllGather(const void* from, void* to, size_t count, Type type, Communicator, cudaStream_t on) {
  return copied(from, to, count, type, on);
}
API Result ncclAlltoAll(const void* from, void* to, size_t count, Type type, Communicator, cudaStream_t on) {
  return copied(from, to, count, type, on);
}
