// Device memory at addresses that host code may not touch, and host memory that is registered. For devices that are made
// of host memory: device.cpp, and the fake CUDA beside it.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

#include "streams.h"

namespace hosted {
constexpr size_t SPACE = size_t(1) << 37;

inline char* reserve(int access) {
  void* found = mmap(nullptr, SPACE, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) { fputs("no address space for the memory of a device\n", stderr); abort(); }
  return static_cast<char*>(found);
}
inline char* const forbidden = reserve(PROT_NONE);  // the addresses that tensors hold
inline char* const bytes = reserve(PROT_READ | PROT_WRITE);  // the same bytes, for the threads of the streams

inline bool is_device(const void* address) {
  return static_cast<const char*>(address) >= forbidden && static_cast<const char*>(address) < forbidden + SPACE;
}
// Where the streams find what lies at a device address.
inline char* real(const void* address) { return bytes + (static_cast<const char*>(address) - forbidden); }

inline std::mutex host_m;
inline std::map<uintptr_t, size_t> registered;
inline std::multimap<uintptr_t, size_t> under_way;  // what copies that nobody waits for still read or write

inline size_t num_touched(const void* begin, size_t size) {
  auto from = reinterpret_cast<uintptr_t>(begin);
  Lock lock(host_m);
  size_t count = 0;
  for (auto& [start, length] : registered) count += from < start + length && start < from + size;
  return count;
}

inline bool is_registered(const void* begin, size_t size) {
  auto from = reinterpret_cast<uintptr_t>(begin);
  Lock lock(host_m);
  auto found = registered.upper_bound(from);
  return found != registered.begin() && (--found, from + size <= found->first + found->second);
}

// Both return CUDA's error numbers, 0 for none.
inline int host_register(uintptr_t begin, size_t size) {
  if (num_touched(reinterpret_cast<void*>(begin), size)) return 712;
  Lock lock(host_m);
  registered[begin] = size;
  return 0;
}

inline int host_unregister(uintptr_t begin) {
  Lock lock(host_m);
  auto found = registered.find(begin);
  if (found == registered.end()) return 713;
  for (auto& [start, size] : under_way)
    if (start < begin + found->second && begin < start + size) note("unregistered under a copy");
  registered.erase(found);
  return 0;
}

using UnderWay = decltype(under_way)::iterator;
inline UnderWay begin_copy(const void* begin, size_t size) {
  Lock lock(host_m);
  return under_way.emplace(reinterpret_cast<uintptr_t>(begin), size);
}
inline void end_copy(UnderWay noted) {
  Lock lock(host_m);
  under_way.erase(noted);
}
}  // namespace hosted
