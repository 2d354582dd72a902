// Hopper's bulk copies from global to shared memory, completing on a barrier in shared memory.
//
// One thread asks for a whole run of bytes; the copy engine takes neither registers nor load slots
// of the multiprocessor. Twins under SIMT_EMULATION copy at once, and a wait is also a __syncwarp.
#pragma once
#include "primitives.cuh"

// One thread makes a barrier of one arrival a phase; `bulk_barriers_made` before others use it.
DEV void bulk_barrier_init(u64* barrier) {
#ifdef SIMT_EMULATION
  *barrier = 0;  // bytes under way, and in bit 63 the parity of the phase
#else
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// The warp's barriers are seen by its lanes and by the copy engine.
DEV void bulk_barriers_made() {
#ifndef SIMT_EMULATION
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  __syncwarp();
}

// This phase ends when `bytes` have come; once a phase, before its copies.
DEV void bulk_expect(u64* barrier, int bytes) {
#ifdef SIMT_EMULATION
  *barrier += bytes;
#else
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
#endif
}

// Addresses and `bytes` are multiples of 16.
DEV void bulk_copy(void* shared, const void* global, int bytes, u64* barrier) {
#ifdef SIMT_EMULATION
  for (int at = 0; at < bytes; at += 16)
    *reinterpret_cast<uint4*>(static_cast<u8*>(shared) + at) =
        simt::load<uint4>(static_cast<const u8*>(global) + at);
  *barrier -= bytes;
  if (!(*barrier & 0xFFFFFFFFu)) *barrier ^= 1ull << 63;
#else
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

// The whole warp waits for the end of a phase; the first phase has parity 0, the next 1, and so on.
DEV void bulk_wait(u64* barrier, u32 parity) {
#ifdef SIMT_EMULATION
  __syncwarp();
  if (*barrier >> 63 == parity) simt::fail("bulk_wait: the copies it waits for were never begun");
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
