// Types and the instructions that CUDA C++ has no function for.
//
// Inline assembly is here and, for what only Hopper has, in wgmma.cuh, bulk_copy.cuh, pipeline.cuh
// and cluster.cuh. Every primitive has a twin under SIMT_EMULATION: the tests compile the same kernels
// with g++ and run them thread by thread, so no .cu file may contain assembly or include anything
// but files of this folder.
#pragma once

#ifdef SIMT_EMULATION
#include <simt.hpp>
#define DEV static inline
#else
#include <cuda_fp16.h>
#define DEV static __device__ __forceinline__
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

constexpr u32 FULL_WARP = 0xFFFFFFFFu;

DEV u32 h2u(__half2 h) { return *reinterpret_cast<u32*>(&h); }
DEV __half2 u2h(u32 u) { return *reinterpret_cast<__half2*>(&u); }
DEV u16 half_bits(__half h) { return *reinterpret_cast<u16*>(&h); }
DEV __half bits_half(u16 u) { return *reinterpret_cast<__half*>(&u); }
DEV uint4 zero16() {
  uint4 zero;
  zero.x = zero.y = zero.z = zero.w = 0;
  return zero;
}

DEV u32 pack_half2(float low, float high) { return h2u(__floats2half2_rn(low, high)); }

// NVRTC knows neither INFINITY nor <cfloat>.
DEV float infinity() { return __uint_as_float(0x7F800000u); }

// Bytes of {b, a} (b the upper word) picked by the four nibbles of `selector`, 0..7 each.
DEV u32 prmt(u32 a, u32 b, u32 selector) {
#ifdef SIMT_EMULATION
  return simt::prmt(a, b, selector);
#else
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
#endif
}

// 0xFF for every byte of `x` whose highest bit is set, otherwise 0.
DEV u32 signs(u32 x) {
#ifdef SIMT_EMULATION
  return ((x >> 7) & 0x01010101u) * 0xFFu;
#else
  return prmt(x, 0, 0xBA98);
#endif
}

// Any function of three bits, at every bit: LUT is what it gives for a=0xF0, b=0xCC, c=0xAA.
template <int LUT>
DEV u32 lop3(u32 a, u32 b, u32 c) {
#ifdef SIMT_EMULATION
  return simt::lop3(a, b, c, LUT);
#else
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(LUT));
  return r;
#endif
}

// 2^x, approximate (2 ulp), subnormal results flushed.
DEV float ex2(float x) {
#ifdef SIMT_EMULATION
  return simt::ex2(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// Streaming loads of data that is read once: read-only path, not kept in L1. `p` is aligned to the
// size of what is read.
DEV uint4 ldg_stream(const void* p) {
#ifdef SIMT_EMULATION
  return simt::load<uint4>(p);
#else
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
#endif
}

// A load through L2, for what other CTAs of the same launch have written.
template <typename T>
DEV T ld_cg(const T* p) {
#ifdef SIMT_EMULATION
  return simt::load<T>(p);
#else
  return __ldcg(p);
#endif
}

// `x` stays what it is, but the compiler no longer knows: nothing derived from it is computed ahead
// of here (hoisted out of a loop, say, into registers that are needed there).
DEV void opaque(u32& x) {
#ifndef SIMT_EMULATION
  asm volatile("" : "+r"(x));
#endif
}

// The same for an address: it is kept, not computed again where it is used.
template <typename T>
DEV void opaque(T*& p) {
#ifndef SIMT_EMULATION
  asm volatile("" : "+l"(p));
#endif
}

// Adds, and returns what was there before, for counting who is done: what the CTA wrote before its
// last barrier is seen by whoever adds later, and after its next barrier by that CTA's threads
// (through L2: `ld_cg`). Cheaper than two __threadfence.
DEV int take_ticket(int* ticket) {
#ifdef SIMT_EMULATION
  return atomicAdd(ticket, 1);
#else
  int before;
  asm volatile("atom.acq_rel.gpu.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
  return before;
#endif
}

// d[16 x 8] += a[16 x 16] b[16 x 8], halves, float accumulators. With g = lane / 4, t = lane % 4:
//   a0 = A[g][2t,2t+1]  a1 = A[g+8][2t,2t+1]  a2 = A[g][2t+8,2t+9]  a3 = A[g+8][2t+8,2t+9]
//   b0 = B[2t,2t+1][g]  b1 = B[2t+8,2t+9][g]
//   d0,d1 = D[g][2t,2t+1]  d2,d3 = D[g+8][2t,2t+1]
DEV void mma16816(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef SIMT_EMULATION
  simt::mma16816(d, a0, a1, a2, a3, b0, b1);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Transpose of an 8 x 8 matrix of halves held as two columns a lane: row lane / 4.
DEV u32 movm(u32 a) {
#ifdef SIMT_EMULATION
  return simt::movm(a);
#else
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
#endif
}

#ifndef SIMT_EMULATION
DEV u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}
#endif

// Four 8 x 8 matrices of halves from shared memory. Lane i names row i % 8 of matrix i / 8 (16
// bytes, 16-byte aligned); r[j] is matrix j's [lane / 4][2 (lane % 4), + 1].
DEV void ldmatrix_x4(u32 (&r)[4], const void* row) {
#ifdef SIMT_EMULATION
  simt::ldmatrix(r, 4, row, false);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
#endif
}

// As `ldmatrix_x4`, every matrix transposed: r[j] is matrix j's [2 (lane % 4), + 1][lane / 4].
DEV void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
#ifdef SIMT_EMULATION
  simt::ldmatrix(r, 4, row, true);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
#endif
}

// Asynchronous copies from global to shared memory, past L1. `cp_async_wait<N>` waits until at
// most the last N committed groups of this thread are under way; other threads see what was
// copied after a barrier.
DEV void cp_async16(void* shared, const void* global) {
#ifdef SIMT_EMULATION
  simt::cp_async(shared, global, 16);
#else
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
#endif
}

// Copies the first `bytes` (0..16) and fills the rest of the 16 with zeros; with 0 `global` is not
// read, but must still be a valid address.
DEV void cp_async16_zfill(void* shared, const void* global, int bytes) {
#ifdef SIMT_EMULATION
  simt::cp_async(shared, global, bytes);
#else
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes)
      : "memory");
#endif
}

// Copies 16 bytes, or zeros if `zero`; `global` must be a valid address all the same.
DEV void cp_async16_or_zero(void* shared, const void* global, bool zero) {
#ifdef SIMT_EMULATION
  simt::cp_async(shared, global, zero ? 0 : 16);
#else
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %2, 0; "
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, p; }" ::"r"(shared_address(shared)),
      "l"(global), "r"(static_cast<int>(zero))
      : "memory");
#endif
}

// The same for 16 bytes (past L1), 8 or 4: what one lane takes of a short row.
template <int BYTES>
DEV void cp_async(void* shared, const void* global) {
  static_assert(BYTES == 16 || BYTES == 8 || BYTES == 4, "sizes of cp.async");
  if constexpr (BYTES == 16) {
    cp_async16(shared, global);
  } else {
#ifdef SIMT_EMULATION
    simt::cp_async(shared, global, BYTES, BYTES);
#else
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(shared_address(shared)),
                 "l"(global), "n"(BYTES)
                 : "memory");
#endif
  }
}

// Four bytes, 4-byte aligned, through L1.
DEV void cp_async4(void* shared, const void* global) {
#ifdef SIMT_EMULATION
  *static_cast<u32*>(shared) = simt::load<u32>(global);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
#endif
}

DEV void cp_async_commit() {
#ifdef SIMT_EMULATION
  simt::cp_async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int N>
DEV void cp_async_wait() {
#ifdef SIMT_EMULATION
  simt::cp_async_wait(N);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Launched so that it may overlap the kernel before it in the stream (Hopper and later), a kernel
// waits here until that one is done and its writes have reached L2; otherwise this does nothing.
// Before it a kernel reads only what no other writes, and writes nothing; after it it reads what
// others wrote with `ld_cg`: this SM's L1 may hold what was there before.
DEV void wait_for_inputs() {
#if !defined(SIMT_EMULATION) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once all CTAs have come here, the next kernel may start where there is room, up to its
// `wait_for_inputs`.
DEV void launch_dependents() {
#if !defined(SIMT_EMULATION) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Two E4M3 codes (low byte first) as two halves; NaN codes become NaN.
DEV u32 e4m3x2_to_half2(u16 codes) {
#if !defined(SIMT_EMULATION) && __CUDA_ARCH__ >= 890
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(codes));
  return r;
#else
  // As half bits the code is value / 256; 15 with mantissa 7 would be 480 instead of NaN.
  const u32 x = prmt(codes, 0, 0x1404);
  const u32 bits = (x & 0x80008000u) | ((x >> 1) & 0x3F803F80u);
  u32 r = h2u(__hmul2(u2h(bits), u2h(0x5C005C00u)));
  if ((codes & 0x7F) == 0x7F) r = (r & 0xFFFF0000u) | 0x7FFFu;
  if ((codes & 0x7F00) == 0x7F00) r = (r & 0x0000FFFFu) | 0x7FFF0000u;
  return r;
#endif
}

// Four E4M3 codes (low byte first) as halves (0, 1) and (2, 3).
DEV void e4m3x4_to_halves(u32 codes, u32& low, u32& high) {
#if !defined(SIMT_EMULATION) && __CUDA_ARCH__ >= 890
  asm("{\n"
      ".reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  low = e4m3x2_to_half2(static_cast<u16>(codes));
  high = e4m3x2_to_half2(static_cast<u16>(codes >> 16));
#endif
}

// A float as an E4M3 code, to nearest even, saturating at 448; NaN stays NaN.
DEV u8 float_to_e4m3(float x) {
#if !defined(SIMT_EMULATION) && __CUDA_ARCH__ >= 890
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.f), "f"(x));
  return static_cast<u8>(r);
#else
  const u32 bits = __float_as_uint(x), sign = (bits >> 24) & 0x80u, size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return static_cast<u8>(sign | 0x7Fu);
  if (size >= 0x43E00000u) return static_cast<u8>(sign | 0x7Eu);  // 448 and more
  if (size < 0x3C800000u) {
    // Below 2^-6 codes are multiples of 2^-9: adding 2^14 rounds to them.
    const float shifted = __fadd_rn(__uint_as_float(size), 16384.f);
    return static_cast<u8>(sign | (__float_as_uint(shifted) - 0x46800000u));
  }
  const u32 rounded = size + 0x7FFFFu + ((size >> 20) & 1u);
  const u32 code = (rounded >> 20) - (120u << 3);
  return static_cast<u8>(sign | (code > 0x7Eu ? 0x7Eu : code));
#endif
}

// A float as an E5M2 code, to nearest even, saturating at 57,344; NaN stays NaN.
DEV u8 float_to_e5m2(float x) {
#if !defined(SIMT_EMULATION) && __CUDA_ARCH__ >= 890
  u16 r;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.f), "f"(x));
  return static_cast<u8>(r);
#else
  const u32 bits = __float_as_uint(x), sign = (bits >> 24) & 0x80u, size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return static_cast<u8>(sign | 0x7Fu);
  if (size >= 0x47600000u) return static_cast<u8>(sign | 0x7Bu);  // 57,344 and more
  if (size < 0x38800000u) {
    // Below 2^-14 codes are multiples of 2^-16: adding 2^7 rounds to them.
    const float shifted = __fadd_rn(__uint_as_float(size), 128.f);
    return static_cast<u8>(sign | (__float_as_uint(shifted) - 0x43000000u));
  }
  const u32 rounded = size + 0xFFFFFu + ((size >> 21) & 1u);
  const u32 code = (rounded >> 21) - (112u << 2);
  return static_cast<u8>(sign | (code > 0x7Bu ? 0x7Bu : code));
#endif
}

// Round to half and keep what is outside its range at its ends; NaN stays NaN.
DEV __half saturate_half(float x) {
  const float limit = 65504.f;
  return __float2half_rn(x > limit ? limit : (x < -limit ? -limit : x));
}

DEV u32 saturate_half2(float low, float high) {
  return h2u(__halves2half2(saturate_half(low), saturate_half(high)));
}

// A pair times a pair of halves, saturating: where a norm's weight is applied.
DEV u32 scaled_half2(float low, float high, u32 scale) {
  const float2 wide = __half22float2(u2h(scale));
  return saturate_half2(low * wide.x, high * wide.y);
}

// Sum and maximum over the warp; all lanes get the same bits.
DEV float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(FULL_WARP, x, offset);
  return x;
}

DEV float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, offset));
  return x;
}
