// Barriers between warps of different roles, and their registers (sm_90a).
//
// A phase of an arrival barrier ends when as many threads have arrived as it was made for; phases
// have parity 0, 1, 0, ... What a thread did before it arrived is seen by whoever waited for that
// phase. Twins for the emulator are in terms of its parking threads.
#pragma once
#include "primitives.cuh"

// By one thread; others may use it after __syncthreads.
DEV void arrivals_init(u64* barrier, u32 count) {
#ifdef SIMT_EMULATION
  *barrier = static_cast<u64>(count) << 32 | count;  // of a phase, and missing; in bit 63 the parity
#else
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
#endif
}

DEV void arrive(u64* barrier) {
#ifdef SIMT_EMULATION
  if (!(--*barrier & 0xFFFFFFFFu)) {
    *barrier = (*barrier ^ 1ull << 63) | (*barrier >> 32 & 0x7FFFFFFFu);
    simt::wake(barrier);
  }
#else
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// This thread arrives when all the cp.async that it has begun are complete; it does not wait.
DEV void arrive_copied(u64* barrier) {
#ifdef SIMT_EMULATION
  simt::cp_async_commit();
  simt::cp_async_wait(0);
  arrive(barrier);
#else
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}

DEV void arrivals_wait(u64* barrier, u32 parity) {
#ifdef SIMT_EMULATION
  while (*barrier >> 63 == parity) simt::park("arrivals_wait", barrier);
#else
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

// Barrier `id` (1..15) of `threads` threads, of which some wait and some only arrive.
DEV void named_sync(int id, int threads) {
#ifdef SIMT_EMULATION
  simt::named_barrier(id, threads, true);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

DEV void named_arrive(int id, int threads) {
#ifdef SIMT_EMULATION
  simt::named_barrier(id, threads, false);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// The most registers that each thread of this warpgroup needs from here on.
template <int COUNT>
DEV void registers_at_most() {
#ifndef SIMT_EMULATION
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// Takes what other warpgroups have given back.
template <int COUNT>
DEV void registers_at_least() {
#ifndef SIMT_EMULATION
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
