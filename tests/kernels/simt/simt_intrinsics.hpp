// CUDA's functions and the twins of primitives.cuh, on top of simt.hpp's meeting points.
#pragma once

// ---------------------------------------------------------------- halves

struct __half {
  _Float16 v;
  __half() = default;
  __half(float x) : v(static_cast<_Float16>(x)) {}
  __half(double x) : v(static_cast<_Float16>(x)) {}
  __half(int x) : v(static_cast<_Float16>(static_cast<float>(x))) {}
  operator float() const { return static_cast<float>(v); }
};
using half = __half;
struct alignas(4) __half2 {
  __half x, y;
  __half2() = default;
  __half2(__half a, __half b) : x(a), y(b) {}
};
using half2 = __half2;

namespace simt {
inline __half from(_Float16 v) { __half h; h.v = v; return h; }
}

static inline __half __float2half_rn(float x) { return simt::from(static_cast<_Float16>(x)); }
static inline __half __float2half(float x) { return __float2half_rn(x); }
static inline float __half2float(__half h) { return static_cast<float>(h.v); }
static inline __half __int2half_rn(int x) { return simt::from(static_cast<_Float16>(x)); }
static inline __half __ushort_as_half(unsigned short u) { __half h; memcpy(&h, &u, 2); return h; }
static inline unsigned short __half_as_ushort(__half h) { unsigned short u; memcpy(&u, &h, 2); return u; }
static inline __half __short_as_half(short u) { __half h; memcpy(&h, &u, 2); return h; }
static inline short __half_as_short(__half h) { short u; memcpy(&u, &h, 2); return u; }
static inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
static inline __half2 __float22half2_rn(float2 a) { return __floats2half2_rn(a.x, a.y); }
static inline __half2 __float2half2_rn(float a) { return __floats2half2_rn(a, a); }
static inline __half2 __half2half2(__half a) { return {a, a}; }
static inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
static inline __half2 make_half2(__half a, __half b) { return {a, b}; }
static inline float2 __half22float2(__half2 a) { return {__half2float(a.x), __half2float(a.y)}; }
static inline float __low2float(__half2 a) { return __half2float(a.x); }
static inline float __high2float(__half2 a) { return __half2float(a.y); }
static inline __half __low2half(__half2 a) { return a.x; }
static inline __half __high2half(__half2 a) { return a.y; }
static inline __half2 __low2half2(__half2 a) { return {a.x, a.x}; }
static inline __half2 __high2half2(__half2 a) { return {a.y, a.y}; }
static inline __half2 __lows2half2(__half2 a, __half2 b) { return {a.x, b.x}; }
static inline __half2 __highs2half2(__half2 a, __half2 b) { return {a.y, b.y}; }

// Sums and products of two halves are exact in double, fused or not: one rounding is the result's.
namespace simt {
inline __half rounded(double x) { return from(static_cast<_Float16>(x)); }
}
#define SIMT_HALF(name, expression) \
  static inline __half __h##name(__half p, __half q) { \
    const double a = p.v, b = q.v; return simt::rounded(expression); } \
  static inline __half2 __h##name##2(__half2 p, __half2 q) { \
    return {__h##name(p.x, q.x), __h##name(p.y, q.y)}; }
SIMT_HALF(add, a + b)
SIMT_HALF(sub, a - b)
SIMT_HALF(mul, a * b)
SIMT_HALF(max, fmax(a, b))
SIMT_HALF(min, fmin(a, b))
static inline __half __hdiv(__half a, __half b) { return simt::rounded(double(a.v) / double(b.v)); }
static inline __half __hfma(__half a, __half b, __half c) { return simt::rounded(double(a.v) * b.v + c.v); }
static inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
static inline __half __hneg(__half a) { return simt::from(-a.v); }
static inline __half2 __hneg2(__half2 a) { return {__hneg(a.x), __hneg(a.y)}; }
static inline __half __habs(__half a) { return __ushort_as_half(__half_as_ushort(a) & 0x7FFF); }
static inline __half2 __habs2(__half2 a) { return {__habs(a.x), __habs(a.y)}; }
static inline bool __hisnan(__half a) { return (__half_as_ushort(a) & 0x7FFF) > 0x7C00; }
static inline bool __hgt(__half a, __half b) { return a.v > b.v; }
static inline bool __hlt(__half a, __half b) { return a.v < b.v; }

// ---------------------------------------------------------------- scalar functions

template <typename To, typename From> static inline To simt_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y; memcpy(&y, &x, sizeof y); return y;
}
static inline unsigned __float_as_uint(float x) { return simt_bits<unsigned>(x); }
static inline int __float_as_int(float x) { return simt_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return simt_bits<float>(x); }
static inline float __int_as_float(int x) { return simt_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return simt_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return simt_bits<double>(x); }
static inline float __fadd_rn(float a, float b) { volatile float s = a + b; return s; }
static inline float __fsub_rn(float a, float b) { volatile float s = a - b; return s; }
static inline float __fmul_rn(float a, float b) { volatile float s = a * b; return s; }
static inline double __dadd_rn(double a, double b) { volatile double s = a + b; return s; }
static inline double __dmul_rn(double a, double b) { volatile double s = a * b; return s; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __frcp_rn(float a) { return 1.f / a; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frsqrt_rn(float a) { return float(1.0 / sqrt(double(a))); }
static inline float rsqrtf(float a) { return float(1.0 / sqrt(double(a))); }
// (glibc declares functions of these names.)
#define __expf(x) expf((x))
#define __exp10f(x) powf(10.f, (x))
#define __logf(x) logf((x))
#define __log2f(x) log2f((x))
#define __sinf(x) sinf((x))
#define __cosf(x) cosf((x))
static inline float __saturatef(float a) { return a > 0 ? (a < 1 ? a : 1.f) : 0.f; }
namespace simt {
// NaN becomes 0, and what does not fit the nearest that does, as on the GPU.
template <typename T> T integer(double a) {
  if (a != a) return 0;
  const double low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
  return T(a < low ? low : a > high ? high : a);
}
}
static inline int __float2int_rn(float a) { return simt::integer<int>(rint(double(a))); }
static inline int __float2int_rz(float a) { return simt::integer<int>(trunc(double(a))); }
static inline int __float2int_rd(float a) { return simt::integer<int>(floor(double(a))); }
static inline unsigned __float2uint_rn(float a) { return simt::integer<unsigned>(rint(double(a))); }
static inline float __int2float_rn(int a) { return float(a); }
static inline float __uint2float_rn(unsigned a) { return float(a); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
  return r;
}
static inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) {
  return unsigned((((unsigned long long)hi << 32 | lo) << (s & 31)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) {
  return unsigned(((unsigned long long)hi << 32 | lo) >> (s & 31));
}
template <typename A, typename B> static inline auto min(A a, B b) { using C = std::common_type_t<A, B>; return C(a) < C(b) ? C(a) : C(b); }
template <typename A, typename B> static inline auto max(A a, B b) { using C = std::common_type_t<A, B>; return C(a) > C(b) ? C(a) : C(b); }
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

// ---------------------------------------------------------------- memory

namespace simt {
template <typename T>
T load(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T))
    fail("a load of " + std::to_string(sizeof(T)) + " bytes is misaligned");
  T value;
  memcpy(&value, p, sizeof value);
  return value;
}
template <typename T>
void store(void* p, T value) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T))
    fail("a store of " + std::to_string(sizeof(T)) + " bytes is misaligned");
  memcpy(p, &value, sizeof value);
}
}
template <typename T> static inline T __ldg(const T* p) { return simt::load<T>(p); }
template <typename T> static inline T __ldcg(const T* p) { return simt::load<T>(p); }
template <typename T> static inline T __ldcs(const T* p) { return simt::load<T>(p); }
template <typename T> static inline T __ldca(const T* p) { return simt::load<T>(p); }
template <typename T> static inline T __ldcv(const T* p) { return simt::load<T>(p); }
template <typename T> static inline void __stcg(T* p, T v) { simt::store(p, v); }
template <typename T> static inline void __stcs(T* p, T v) { simt::store(p, v); }
template <typename T> static inline void __stwb(T* p, T v) { simt::store(p, v); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static inline void __nanosleep(unsigned) {}
static inline void __trap() { simt::fail("__trap()"); }

// Fibers switch only at meeting points, so every access is atomic.
namespace simt { template <typename T> struct identity { using type = T; }; }
#define SIMT_ATOMIC(name, expression) \
  template <typename T> static inline T atomic##name(T* p, typename simt::identity<T>::type v) { \
    const T old = simt::load<T>(p); *p = (expression); return old; }
SIMT_ATOMIC(Add, old + v)
SIMT_ATOMIC(Sub, old - v)
SIMT_ATOMIC(Exch, v)
SIMT_ATOMIC(Max, old > v ? old : v)
SIMT_ATOMIC(Min, old < v ? old : v)
SIMT_ATOMIC(Or, old | v)
SIMT_ATOMIC(And, old & v)
SIMT_ATOMIC(Xor, old ^ v)
SIMT_ATOMIC(Inc, old >= v ? 0 : old + 1)
template <typename T>
static inline T atomicCAS(T* p, typename simt::identity<T>::type expected, typename simt::identity<T>::type v) {
  const T old = simt::load<T>(p);
  if (old == expected) *p = v;
  return old;
}

// ---------------------------------------------------------------- meeting points

static inline void __syncthreads() { simt::barrier("__syncthreads", simt::Vote::none, 0); }
static inline int __syncthreads_or(int p) { return simt::barrier("__syncthreads_or", simt::Vote::any, p); }
static inline int __syncthreads_and(int p) { return simt::barrier("__syncthreads_and", simt::Vote::all, p); }
static inline int __syncthreads_count(int p) { return simt::barrier("__syncthreads_count", simt::Vote::count, p); }

static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
  const int lanes = simt::thread_count - (simt::current->id & ~31);
  if (lanes < 32) mask &= (1u << lanes) - 1;
  simt::meet("__syncwarp", mask, [](void**, unsigned) {}, nullptr);
}

namespace simt {

template <typename T>
struct Exchange {
  T value, result;
  int source;  // a lane, or -1 for the own value
};

template <typename T>
void exchange(void** frames, unsigned mask) {
  auto** all = reinterpret_cast<Exchange<T>**>(frames);
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    const int from = all[i]->source < 0 ? i : all[i]->source;
    // From a lane outside the mask the hardware gives anything: all ones shows.
    if (mask >> from & 1) all[i]->result = all[from]->value;
    else memset(static_cast<void*>(&all[i]->result), 0xFF, sizeof(T));
  }
}

template <typename T>
T shuffle(const char* what, unsigned mask, T value, int source) {
  Exchange<T> frame{value, value, source};
  meet(what, mask, exchange<T>, &frame);
  return frame.result;
}

struct Ballot {
  bool predicate;
  unsigned result;
};

inline unsigned ballot(const char* what, unsigned mask, bool predicate) {
  Ballot frame{predicate, 0};
  meet(what, mask, [](void** frames, unsigned mask) {
    auto** all = reinterpret_cast<Ballot**>(frames);
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1) bits |= unsigned(all[i]->predicate) << i;
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1) all[i]->result = bits;
  }, &frame);
  return frame.result;
}

inline int lane() { return current->id & 31; }

}  // namespace simt

template <typename T> static inline T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
  const int base = simt::lane() & ~(width - 1);
  return simt::shuffle("__shfl_sync", mask, v, base + (source & (width - 1)));
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T v, int x, int width = 32) {
  const int to = simt::lane() ^ x;
  return simt::shuffle("__shfl_xor_sync", mask, v, (to & ~(width - 1)) > simt::lane() ? -1 : to);
}
template <typename T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned d, int width = 32) {
  const int to = simt::lane() - int(d);
  return simt::shuffle("__shfl_up_sync", mask, v, to < (simt::lane() & ~(width - 1)) ? -1 : to);
}
template <typename T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned d, int width = 32) {
  const int to = simt::lane() + int(d);
  return simt::shuffle("__shfl_down_sync", mask, v, to >= (simt::lane() & ~(width - 1)) + width ? -1 : to);
}
static inline unsigned __ballot_sync(unsigned mask, int p) { return simt::ballot("__ballot_sync", mask, p); }
static inline int __any_sync(unsigned mask, int p) { return simt::ballot("__any_sync", mask, p) != 0; }
static inline int __all_sync(unsigned mask, int p) { return simt::ballot("__all_sync", mask, p) == mask; }
template <typename T> static inline unsigned __match_any_sync(unsigned mask, T v) {
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    if (simt::shuffle("__match_any_sync", mask, v, i) == v) bits |= 1u << i;
  }
  return bits;
}
#define SIMT_REDUCE(name, start, expression) \
  template <typename T> static inline T __reduce_##name##_sync(unsigned mask, T v) { \
    T a = start; \
    for (int i = 0; i < 32; ++i) { \
      if (!(mask >> i & 1)) continue; \
      const T b = simt::shuffle("__reduce_" #name "_sync", mask, v, i); a = (expression); } \
    return a; }
SIMT_REDUCE(add, T(0), a + b)
SIMT_REDUCE(max, v, a > b ? a : b)
SIMT_REDUCE(min, v, a < b ? a : b)
SIMT_REDUCE(or, T(0), a | b)
SIMT_REDUCE(and, ~T(0), a & b)

// ---------------------------------------------------------------- twins of primitives.cuh

namespace simt {

inline unsigned prmt(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> 4 * i & 15;
    unsigned byte = unsigned(both >> 8 * (s & 7)) & 0xFF;
    if (s & 8) byte = byte & 0x80 ? 0xFF : 0;  // replicates the sign
    r |= byte << 8 * i;
  }
  return r;
}

inline unsigned lop3(unsigned a, unsigned b, unsigned c, int lut) {
  unsigned r = 0;
  for (int i = 0; i < 8; ++i)
    if (lut >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}

inline float ex2(float x) { return exp2f(x); }

inline float half_at(unsigned pair, int i) {
  const unsigned short bits = static_cast<unsigned short>(pair >> 16 * i);
  __half h;
  memcpy(&h, &bits, 2);
  return __half2float(h);
}

struct Mma {
  float* d;
  unsigned a[4], b[2];
};

inline void mma16816(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                     unsigned b1) {
  Mma frame{d, {a0, a1, a2, a3}, {b0, b1}};
  meet("mma16816", 0xFFFFFFFFu, [](void** frames, unsigned) {
    auto** all = reinterpret_cast<Mma**>(frames);
    float a[16][16], b[16][8];
    for (int i = 0; i < 32; ++i) {
      const int g = i / 4, t = i % 4;
      for (int e = 0; e < 2; ++e) {
        a[g][2 * t + e] = half_at(all[i]->a[0], e);
        a[g + 8][2 * t + e] = half_at(all[i]->a[1], e);
        a[g][2 * t + 8 + e] = half_at(all[i]->a[2], e);
        a[g + 8][2 * t + 8 + e] = half_at(all[i]->a[3], e);
        b[2 * t + e][g] = half_at(all[i]->b[0], e);
        b[2 * t + 8 + e][g] = half_at(all[i]->b[1], e);
      }
    }
    for (int i = 0; i < 32; ++i)
      for (int e = 0; e < 4; ++e) {
        const int row = i / 4 + 8 * (e / 2), column = 2 * (i % 4) + e % 2;
        double sum = all[i]->d[e];
        for (int k = 0; k < 16; ++k) sum += double(a[row][k]) * b[k][column];
        all[i]->d[e] = static_cast<float>(sum);
      }
  }, &frame);
}

struct Movm {
  unsigned in, out;
};

inline unsigned movm(unsigned a) {
  Movm frame{a, 0};
  meet("movm", 0xFFFFFFFFu, [](void** frames, unsigned) {
    auto** all = reinterpret_cast<Movm**>(frames);
    auto at = [&](int row, int column) {
      return all[4 * row + column / 2]->in >> 16 * (column % 2) & 0xFFFF;
    };
    for (int i = 0; i < 32; ++i) {
      const int row = i / 4, column = 2 * (i % 4);
      all[i]->out = at(column, row) | at(column + 1, row) << 16;
    }
  }, &frame);
  return frame.out;
}

struct Ldmatrix {
  unsigned* out;
  const unsigned short* row;
  int count;
  bool transposed;
};

inline void ldmatrix(unsigned* out, int count, const void* row, bool transposed) {
  if (lane() < 8 * count && reinterpret_cast<uintptr_t>(row) % 16)
    fail("ldmatrix: a row is not 16-byte aligned");
  Ldmatrix frame{out, static_cast<const unsigned short*>(row), count, transposed};
  meet("ldmatrix", 0xFFFFFFFFu, [](void** frames, unsigned) {
    auto** all = reinterpret_cast<Ldmatrix**>(frames);
    for (int i = 0; i < 32; ++i)
      for (int j = 0; j < all[i]->count; ++j) {
        auto at = [&](int row, int column) { return unsigned(all[8 * j + row]->row[column]); };
        const int row = i / 4, column = 2 * (i % 4);
        all[i]->out[j] = all[i]->transposed ? at(column, row) | at(column + 1, row) << 16
                                            : at(row, column) | at(row, column + 1) << 16;
      }
  }, &frame);
}

// What cp.async copies appears when it is waited for, no sooner.
inline void cp_async(void* to, const void* from, int bytes, int width = 16) {
  if (reinterpret_cast<uintptr_t>(to) % width || reinterpret_cast<uintptr_t>(from) % width)
    fail("cp_async: an address is not " + std::to_string(width) + "-byte aligned");
  if (bytes < 0 || bytes > width) fail("cp_async16_zfill: bytes are not in 0..16");
  current->copies.push_back({to, from, bytes, width, current->group});
}

inline void cp_async_commit() { ++current->group; }

inline void cp_async_wait(int pending) {
  auto& copies = current->copies;
  size_t kept = 0;
  for (const Copy& copy : copies) {
    if (copy.group >= current->group - pending) {
      copies[kept++] = copy;
      continue;
    }
    char data[16] = {};
    if (copy.bytes) memcpy(data, copy.from, copy.bytes);
    memcpy(copy.to, data, copy.width);
  }
  copies.resize(kept);
}

}  // namespace simt
