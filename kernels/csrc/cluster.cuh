// Clusters of CTAs that read each other's shared memory (sm_90a).
#pragma once
#include "primitives.cuh"

// All threads of a cluster of SIZE CTAs that have not ended arrive, and may do something else before
// they wait for all the others: what these did before they arrived is seen after the wait.
template <int SIZE>
DEV void cluster_arrive() {
#ifdef SIMT_EMULATION
  simt::cluster_arrive(SIZE);
#else
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

DEV void cluster_wait() {
#ifdef SIMT_EMULATION
  simt::cluster_wait();
#else
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// What CTA `rank` of the cluster has where `own` is in this one's dynamic shared memory.
DEV float4 cluster_load(const float* own, int rank) {
#ifdef SIMT_EMULATION
  return *reinterpret_cast<const float4*>(simt::in_cluster(own, rank));
#else
  float4 r;
  asm volatile(
      "{\n"
      ".reg .u32 there;\n"
      "mapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n"
      "}"
      : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
      : "r"(shared_address(own)), "r"(rank)
      : "memory");
  return r;
#endif
}
