// A GPU's threads as fibers: what a CUDA kernel sees when g++ compiles it for the emulator.
//
// The threads of one block are fibers on one system thread. A fiber runs until it meets the others:
// at a barrier, a shuffle, a vote or a matrix instruction. There it leaves a frame with its inputs;
// the last lane to arrive computes the results of all. Blocks run one after another. Even blocks
// start their threads in ascending order, odd ones in descending order, so that a missing barrier
// shows in one of them. Global memory is bounded by unmapped pages (build.py), and a bad access
// ends the launch with a message that names the thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <link.h>
#include <sys/mman.h>
#include <xmmintrin.h>

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static thread_local  // not for threads: it keeps a file's variables together
#define __constant__ static const
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

// ---------------------------------------------------------------- vector types

#define SIMT_VECTOR2(name, type) struct alignas(2 * sizeof(type)) name { type x, y; }; \
  static inline name make_##name(type x, type y) { return name{x, y}; }
#define SIMT_VECTOR4(name, type, align) struct alignas(align) name { type x, y, z, w; }; \
  static inline name make_##name(type x, type y, type z, type w) { return name{x, y, z, w}; }
SIMT_VECTOR2(float2, float)
SIMT_VECTOR2(int2, int)
SIMT_VECTOR2(uint2, unsigned)
SIMT_VECTOR2(ushort2, unsigned short)
SIMT_VECTOR2(uchar2, unsigned char)
SIMT_VECTOR2(longlong2, long long)
SIMT_VECTOR2(ulonglong2, unsigned long long)
SIMT_VECTOR2(double2, double)
SIMT_VECTOR4(float4, float, 16)
SIMT_VECTOR4(int4, int, 16)
SIMT_VECTOR4(uint4, unsigned, 16)
SIMT_VECTOR4(ushort4, unsigned short, 8)
SIMT_VECTOR4(uchar4, unsigned char, 4)
struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };

// ---------------------------------------------------------------- the machine

namespace simt {

constexpr int THREADS_MAX = 1024;
constexpr size_t STACK_BYTES = 256 * 1024;
constexpr size_t SHARED_MAX = 232 * 1024;
constexpr int CLUSTER_MAX = 8;

struct Copy {
  void* to;
  const void* from;
  int bytes;
  int width;
  int group;
};

using Apply = void (*)(void** frames, unsigned mask);

struct Thread {
  void* stack_pointer = nullptr;
  uint3 index{};
  int id = 0;
  bool done = false;
  bool blocked = false;
  // What the thread waits for: a warp operation of `mask`, or a block barrier (mask 0).
  const char* waits_for = nullptr;
  unsigned mask = 0;
  Apply apply = nullptr;
  void* frame = nullptr;
  const void* parked_on = nullptr;
  long cluster_waits = 0;
  int group = 0;
  std::vector<Copy> copies;
};

inline Thread threads[THREADS_MAX];
inline Thread* current;
inline int thread_count;
inline int finished;
inline int at_barrier;
inline const char* barrier_kind;
inline int barrier_value;
inline int barrier_result;
inline int named_arrived[16], named_threads[16];
// Of the block's cluster: which of its blocks this is, how many there are (0: it has none so far),
// how many threads have arrived at its barrier, and how many times all have.
inline int member, cluster_size, cluster_arrived;
inline long cluster_phase;
inline uint3 block_index;
inline dim3 block_dim, grid_dim;
inline void* scheduler_stack;
inline char* stacks;
inline char* shared_memory;
inline size_t shared_bytes;
inline std::string failure;
inline std::string kernel_name;
inline void (*body)();

// ---------------------------------------------------------------- fibers

#if defined(__x86_64__)
// Saves the callee-saved registers on the stack, stores the stack pointer through the first
// argument and continues on the second. (ucontext makes two system calls a switch.)
extern "C" void simt_switch(void** save, void* to) __attribute__((visibility("hidden")));
asm(R"(
.text
.hidden simt_switch
.globl simt_switch
.type simt_switch,@function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");
#else
#error "the emulator's fibers are written for x86-64"
#endif

inline void to_scheduler() { simt_switch(&current->stack_pointer, scheduler_stack); }

[[noreturn]] inline void fail(const std::string& what) {
  if (failure.empty()) {
    char place[160];
    snprintf(place, sizeof place, "block (%u,%u,%u), thread %d (warp %d, lane %d): ",
             block_index.x, block_index.y, block_index.z, current->id, current->id / 32,
             current->id % 32);
    failure = place + what;
  }
  to_scheduler();
  abort();
}

inline void entry() {
  body();
  current->done = true;
  ++finished;
  to_scheduler();
  abort();
}

inline void start(Thread& thread, int id) {
  thread.id = id;
  thread.index = {id % block_dim.x, id / block_dim.x % block_dim.y,
                  id / (block_dim.x * block_dim.y)};
  thread.done = thread.blocked = false;
  thread.waits_for = nullptr;
  thread.parked_on = nullptr;
  thread.cluster_waits = 0;
  thread.group = 0;
  thread.copies.clear();
  void** top = reinterpret_cast<void**>(stacks + (member * THREADS_MAX + id + 1) * STACK_BYTES);
  *--top = nullptr;                             // keeps the stack 16-byte aligned after `ret`
  *--top = reinterpret_cast<void*>(&entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  thread.stack_pointer = top;
}

inline void wait_blocked(const char* what) {
  current->waits_for = what;
  current->blocked = true;
  to_scheduler();
}

// ---------------------------------------------------------------- meeting points

// Waits for all lanes of `mask`, then the last to come runs `apply` on the frames of all.
inline void meet(const char* what, unsigned mask, Apply apply, void* frame) {
  const int warp = current->id & ~31, lane = current->id & 31;
  if (!(mask >> lane & 1)) fail(std::string(what) + ": the mask leaves out the calling lane");
  current->mask = mask;
  current->apply = apply;
  current->frame = frame;
  current->waits_for = what;
  void* frames[32] = {};
  bool complete = true;
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    if (warp + i >= thread_count) fail(std::string(what) + ": the mask names a lane that is none");
    Thread& other = threads[warp + i];
    if (other.done) fail(std::string(what) + ": the mask names lane " + std::to_string(i) +
                         ", which has returned");
    if (&other != current && !(other.blocked && other.mask == mask && other.apply == apply &&
                               other.waits_for == what)) {
      complete = false;  // a lane that never comes shows when nothing can go on
      break;
    }
    frames[i] = other.frame;
  }
  if (!complete) {
    wait_blocked(what);
    return;
  }
  apply(frames, mask);
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) threads[warp + i].blocked = false;
  current->mask = 0;
}

enum class Vote { none, any, all, count };

inline int barrier(const char* what, Vote vote, int predicate) {
  if (at_barrier == 0) {
    barrier_kind = what;
    barrier_value = vote == Vote::all;
  } else if (strcmp(barrier_kind, what) != 0) {
    fail(std::string(what) + " meets " + barrier_kind + " of other threads");
  }
  if (vote == Vote::any) barrier_value |= predicate != 0;
  if (vote == Vote::all) barrier_value &= predicate != 0;
  if (vote == Vote::count) barrier_value += predicate != 0;
  ++at_barrier;
  current->mask = 0;
  wait_blocked(what);
  return barrier_result;
}

// For barriers that a thread meets alone: it sleeps until another one wakes those on `object`.
inline void park(const char* what, const void* object) {
  current->mask = 0;
  current->parked_on = object;
  wait_blocked(what);
}

inline void wake(const void* object) {
  for (int i = 0; i < thread_count; ++i) {
    if (threads[i].parked_on != object) continue;
    threads[i].parked_on = nullptr;
    threads[i].blocked = false;
  }
}

inline void named_barrier(int id, int count, bool waits) {
  if (id < 1 || id > 15 || count % 32) fail("named barrier: an id or a count that is none");
  if (named_arrived[id] && named_threads[id] != count)
    fail("named barrier: threads disagree about its size");
  named_threads[id] = count;
  if (++named_arrived[id] == count) {
    named_arrived[id] = 0;
    wake(&named_arrived[id]);
  } else if (waits) {
    park("named barrier", &named_arrived[id]);
  }
}

// Static shared memory is what the shared object has of thread-local data.
struct Span {
  void* begin = nullptr;
  size_t bytes = 0;
};

inline Span statics;
inline thread_local char anchor;

inline Span static_shared() {
  Span found;
  *const_cast<volatile char*>(&anchor) = 0;  // allocates the data
  dl_iterate_phdr([](dl_phdr_info* info, size_t, void* result) {
    const auto here = reinterpret_cast<uintptr_t>(&static_shared);
    bool ours = false;
    size_t bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& header = info->dlpi_phdr[i];
      if (header.p_type == PT_LOAD && here - info->dlpi_addr - header.p_vaddr < header.p_memsz)
        ours = true;
      if (header.p_type == PT_TLS) bytes = header.p_memsz;
    }
    if (ours) *static_cast<Span*>(result) = {info->dlpi_tls_data, bytes};
    return int(ours);
  }, &found);
  return found;
}

// Blocks of a cluster run by turns, each until all its threads wait for the others' or have returned.
// What a thread must not find changed by others meanwhile is kept here.
struct Suspended {
  std::vector<Thread> threads;
  std::vector<char> statics;
  int finished;
  uint3 index;
};
inline Suspended suspended[CLUSTER_MAX];
inline char* cluster_shared[CLUSTER_MAX];  // dynamic shared memory of each

inline void cluster_arrive(int size) {
  if (size > CLUSTER_MAX || (cluster_size && cluster_size != size))
    fail("cluster: a size that is none, or threads disagree about it");
  if (current->cluster_waits) fail("cluster_arrive: the thread has not waited since it last arrived");
  cluster_size = size;
  current->cluster_waits = cluster_phase + 1;
  ++cluster_arrived;
}

inline void cluster_wait() {
  if (!current->cluster_waits) fail("cluster_wait: the thread has not arrived");
  if (current->cluster_waits > cluster_phase) park("the cluster's barrier", &cluster_phase);
  current->cluster_waits = 0;
}

inline const char* in_cluster(const void* own, int rank) {
  const char* at = static_cast<const char*>(own);
  if (rank < 0 || rank >= cluster_size || at < shared_memory || at >= shared_memory + shared_bytes)
    fail("cluster: an address or a block that is none");
  return cluster_shared[rank] + (at - shared_memory);
}

// Whether every thread of the block waits for its cluster, or has returned.
inline bool waits_for_cluster() {
  if (!cluster_size) return false;
  for (int i = 0; i < thread_count; ++i)
    if (!threads[i].done && threads[i].parked_on != &cluster_phase) return false;
  return true;
}

inline void begin_block() {
  finished = at_barrier = 0;
  memset(named_arrived, 0, sizeof named_arrived);
  // Whoever reads shared memory that was not written gets NaN or a wild index.
  memset(shared_memory, 0xFF, shared_bytes);
  memset(statics.begin, 0xFF, statics.bytes);
  for (int i = 0; i < thread_count; ++i) start(threads[i], i);
}

// Until all threads have returned, or wait for the blocks of their cluster.
inline void run_block() {
  const int warps = (thread_count + 31) / 32;
  const bool descending = (block_index.x + block_index.y + block_index.z) & 1;
  while (finished < thread_count) {
    bool progress = false;
    for (int w = 0; w < warps; ++w) {
      // A warp goes on until all its lanes wait for the block, or have returned.
      const int first = (descending ? warps - 1 - w : w) * 32;
      const int lanes = thread_count - first < 32 ? thread_count - first : 32;
      for (bool again = true; again;) {
        again = false;
        for (int i = 0; i < lanes; ++i) {
          Thread& thread = threads[first + (descending ? lanes - 1 - i : i)];
          if (thread.done || thread.blocked) continue;
          current = &thread;
          simt_switch(&scheduler_stack, thread.stack_pointer);
          if (!failure.empty()) return;
          again = progress = true;
        }
      }
    }
    if (at_barrier && at_barrier == thread_count - finished) {
      barrier_result = barrier_value;
      at_barrier = 0;
      for (int i = 0; i < thread_count; ++i)
        if (!threads[i].done) threads[i].blocked = false;
      progress = true;
    }
    if (!progress && waits_for_cluster()) return;
    if (!progress) {
      std::string stuck;
      int shown = 0;
      for (int i = 0; i < thread_count && shown < 8; ++i) {
        if (threads[i].done) continue;
        char text[120];
        snprintf(text, sizeof text, "%s thread %d waits for %s (mask %08x)", shown++ ? "," : "", i,
                 threads[i].waits_for, threads[i].mask);
        stuck += text;
      }
      for (int i = 0; i < thread_count; ++i)
        if (!threads[i].done) { current = &threads[i]; break; }
      char place[120];
      snprintf(place, sizeof place, "block (%u,%u,%u) is stuck, %d of %d threads returned:",
               block_index.x, block_index.y, block_index.z, finished, thread_count);
      failure = place + stuck;
      return;
    }
  }
}

inline void suspend() {
  Suspended& kept = suspended[member];
  kept.threads.assign(threads, threads + thread_count);
  const char* from = static_cast<const char*>(statics.begin);
  kept.statics.assign(from, from + statics.bytes);
  kept.finished = finished;
  kept.index = block_index;
}

inline void resume(int which) {
  const Suspended& kept = suspended[member = which];
  std::copy(kept.threads.begin(), kept.threads.end(), threads);
  memcpy(statics.begin, kept.statics.data(), statics.bytes);
  finished = kept.finished;
  block_index = kept.index;
  shared_memory = cluster_shared[which];
}

// The block is one of a cluster: it is the last of them, or the next ones come first.
inline void run_cluster() {
  suspend();
  if (++member < cluster_size) {
    shared_memory = cluster_shared[member];
    return;
  }
  for (bool ended = false; !ended && failure.empty();) {
    ended = true;
    int living = 0;
    for (int i = 0; i < cluster_size; ++i) living += thread_count - suspended[i].finished;
    if (cluster_arrived < living) {
      resume(0);
      current = &threads[0];
      failure = "cluster: some of its threads wait, others never arrive";
      return;
    }
    cluster_arrived = 0;
    ++cluster_phase;
    for (int i = 0; i < cluster_size && failure.empty(); ++i) {
      resume(i);
      wake(&cluster_phase);
      run_block();
      ended &= finished == thread_count;
      suspend();
    }
  }
  cluster_size = cluster_arrived = member = 0;
  shared_memory = cluster_shared[0];
}

// ---------------------------------------------------------------- faults

struct Region {
  const char* begin;
  const char* end;
  int argument;
};
inline std::vector<Region> regions;

inline void on_fault(int number, siginfo_t* info, void*) {
  const char* at = static_cast<const char*>(info->si_addr);
  std::string what;
  if (number == SIGFPE) {
    what = "integer division by zero";
  } else if (at == nullptr) {
    what = "a null, wild or misaligned pointer is used";
  } else {
    char text[200];
    snprintf(text, sizeof text, "access to %p, which is no argument's memory", (const void*)at);
    what = text;
    for (const Region& region : regions) {
      const long behind = at - region.end, before = region.begin - at;
      if (behind >= 0 && behind < 4096)
        snprintf(text, sizeof text, "access %ld bytes behind the end of argument %d's storage",
                 behind, region.argument);
      else if (before > 0 && before <= 8192)
        snprintf(text, sizeof text, "access %ld bytes before argument %d's storage", before,
                 region.argument);
      else
        continue;
      what = text;
      break;
    }
  }
  fail(what);
}

struct FaultHandlers {
  struct sigaction before[3];
  static constexpr int numbers[3] = {SIGSEGV, SIGBUS, SIGFPE};
  FaultHandlers() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;  // the handler never returns
    for (int i = 0; i < 3; ++i) sigaction(numbers[i], &action, &before[i]);
  }
  ~FaultHandlers() {
    for (int i = 0; i < 3; ++i) sigaction(numbers[i], &before[i], nullptr);
  }
};

inline void run_grid(void (*kernel)(), const unsigned* grid, unsigned block, size_t dynamic) {
  if (!stacks) {
    stacks = static_cast<char*>(mmap(nullptr, CLUSTER_MAX * THREADS_MAX * STACK_BYTES,
                                     PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    // Dynamic shared memory ends at an unmapped page.
    for (char*& shared : cluster_shared) {
      shared = static_cast<char*>(mmap(nullptr, SHARED_MAX + 4096, PROT_NONE,
                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      mprotect(shared, SHARED_MAX, PROT_READ | PROT_WRITE);
      shared += SHARED_MAX;
    }
  }
  static char* const* const ends = new char*[CLUSTER_MAX]{
      cluster_shared[0], cluster_shared[1], cluster_shared[2], cluster_shared[3],
      cluster_shared[4], cluster_shared[5], cluster_shared[6], cluster_shared[7]};
  shared_bytes = (dynamic + 15) / 16 * 16;
  for (int i = 0; i < CLUSTER_MAX; ++i) cluster_shared[i] = ends[i] - shared_bytes;
  shared_memory = cluster_shared[0];
  member = cluster_size = cluster_arrived = 0;
  statics = static_shared();
  body = kernel;
  grid_dim = {grid[0], grid[1], grid[2]};
  block_dim = {block, 1, 1};
  thread_count = static_cast<int>(block);
  failure.clear();
  FaultHandlers handlers;
  const unsigned control = _mm_getcsr();
  _mm_setcsr(control | 0x8040);  // subnormal floats are zero, as with -ftz=true
  for (unsigned z = 0; z < grid[2] && failure.empty(); ++z)
    for (unsigned y = 0; y < grid[1] && failure.empty(); ++y)
      for (unsigned x = 0; x < grid[0] && failure.empty(); ++x) {
        block_index = {x, y, z};
        begin_block();
        run_block();
        if (cluster_size && failure.empty()) run_cluster();
      }
  if (member && failure.empty()) failure = "cluster: the grid ends within one";
  _mm_setcsr(control);
}

// ---------------------------------------------------------------- calling a kernel by pointers

template <typename T>
const char* kind() {
  if constexpr (std::is_pointer_v<T>) return "pointer";
  else if constexpr (std::is_same_v<T, float>) return "float32";
  else if constexpr (std::is_integral_v<T> && sizeof(T) == 4)
    return std::is_signed_v<T> ? "int32" : "uint32";
  else if constexpr (std::is_integral_v<T> && sizeof(T) == 8)
    return std::is_signed_v<T> ? "int64" : "uint64";
  else return "unsupported";
}

template <typename... A>
std::string kinds(void (*)(A...)) {
  std::string all;
  ((all += std::string(all.empty() ? "" : ",") + kind<std::remove_cv_t<A>>()), ...);
  return all;
}

// Memory whose last byte (rounded up to 16) is followed by an unmapped page, filled with ones.
inline char* allocate(size_t bytes, int argument) {
  const size_t used = (bytes + 15) / 16 * 16, pages = (used + 4095) / 4096 * 4096;
  char* all = static_cast<char*>(mmap(nullptr, pages + 2 * 4096, PROT_NONE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (pages) {
    mprotect(all + 4096, pages, PROT_READ | PROT_WRITE);
    memset(all + 4096, 0xFF, pages);
  }
  char* begin = all + 4096 + pages - used;
  regions.push_back({begin, begin + bytes, argument});
  return begin;
}

// Whether the bytes around a region, on its own pages, are still ones; unmaps it.
inline bool release(const Region& region) {
  const size_t bytes = region.end - region.begin;
  const size_t used = (bytes + 15) / 16 * 16, pages = (used + 4095) / 4096 * 4096;
  const char* first = region.begin + used - pages;
  bool whole = true;
  for (const char* p = first; p < region.begin; ++p) whole &= *p == char(0xFF);
  for (const char* p = region.end; p < region.begin + used; ++p) whole &= *p == char(0xFF);
  munmap(const_cast<char*>(first - 4096), pages + 2 * 4096);
  return whole;
}

inline void** arguments;

template <auto Kernel>
struct Call;

template <typename... A, void (*Kernel)(A...)>
struct Call<Kernel> {
  template <size_t... I>
  static void expand(std::index_sequence<I...>) {
    Kernel(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
  }
  static void run() { expand(std::index_sequence_for<A...>{}); }
};

// What build.py calls: `simt_kernels` is a table that the generated file fills in.
struct Kernel {
  const char* name;
  void (*run)();
  std::string kinds;
};

}  // namespace simt

#define SIMT_KERNEL(...) simt::Kernel{#__VA_ARGS__, &simt::Call<&__VA_ARGS__>::run, \
                                      simt::kinds(&__VA_ARGS__)}
#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))

#define SIMT_ENTRIES(...)                                                                       \
  static simt::Kernel simt_kernels[] = {__VA_ARGS__};                                           \
  SIMT_EXPORT const char* simt_kinds(int which) { return simt_kernels[which].kinds.c_str(); }   \
  SIMT_EXPORT char* simt_allocate(size_t bytes, int argument) {                                 \
    return simt::allocate(bytes, argument);                                                     \
  }                                                                                             \
  SIMT_EXPORT const char* simt_run(int which, const unsigned* grid, unsigned block,             \
                                   size_t dynamic, void** arguments) {                          \
    simt::arguments = arguments;                                                                \
    simt::run_grid(simt_kernels[which].run, grid, block, dynamic);                              \
    return simt::failure.c_str();                                                               \
  }                                                                                             \
  /* The argument whose surroundings were written to, or -1. */                                 \
  SIMT_EXPORT int simt_release() {                                                              \
    int damaged = -1;                                                                           \
    for (const simt::Region& region : simt::regions)                                            \
      if (!simt::release(region)) damaged = region.argument;                                    \
    simt::regions.clear();                                                                      \
    return damaged;                                                                             \
  }

#define threadIdx (simt::current->index)
#define blockIdx (simt::block_index)
#define blockDim (simt::block_dim)
#define gridDim (simt::grid_dim)
#define warpSize 32

#include "simt_intrinsics.hpp"
