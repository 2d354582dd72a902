// From logits to token ids: greedy, or drawn after min-p, top-k and top-p, without a sort.
//
// Grid: (slices of SLICE ids, rows); blocks of THREADS, each thread EACH ids that follow each other.
// sample_narrow may have fewer CTAs a row, which then take several slices each. In every pass the
// last CTA of a row, by its ticket, decides for the row.
//
// A token's *key* is how far its logit lies below the row's largest, divided by the temperature, in
// fixed point: the less, the likelier. Its *weight* is exp(-that), in fixed point as well. Sums and
// counts are of integers, so they are the same in whatever order they are made, and tokens are
// ordered by (key, id). A token whose weight is nothing beside the largest (2^-45) is never drawn.
//
//   sample_scan    the largest logit and its lowest id; rows without a choice get id -1
//   sample_narrow  one digit of the key of the last token that is kept, from a histogram: LEVELS
//                  passes of DIGIT bits, by the number of tokens (top-k), then by their weight
//                  (top-p); they end early once whole bins are kept
//   sample_find    which of equal keys are kept; and the draw: the first id, in ascending order,
//                  where the weights up to it exceed the drawn share of all of them
#include "primitives.cuh"

constexpr int THREADS = 256, EACH = 8, SLICE = THREADS * EACH;
constexpr int DIGIT = 11, BINS = 1 << DIGIT, LEVELS = 4, KEY_BITS = DIGIT * LEVELS;
constexpr int BINS_EACH = BINS / THREADS;
constexpr int KEY_POINT = KEY_BITS - 5;  // keys are below 32 = 2^5
constexpr int WEIGHT_POINT = 44;       // 2^18 tokens of weight 1 fit 63 bits
constexpr double FAR = 31.191623125197544;  // exp(-FAR) is half of 2^-WEIGHT_POINT

enum Mode { SKIP = 0, GREEDY = 1, DRAW = 2 };
enum Phase { TOP_K = 0, TOP_P = 1, CHOICE = 2 };
enum Real { TEMPERATURE, MIN_P, NUCLEUS, REPETITION, PRESENCE, FREQUENCY, REALS };
enum Whole { MODE, SEED, INDEX, SEQUENCE, COUNT, SEEN_BEGIN, SEEN_END, WHOLES };
// Of a row between passes. OPEN: 0 nothing is searched, 1 a digit, 2 which of equal keys.
enum State { LARGEST, LIMIT, LIMIT_ID, PREFIX, NEED, OPEN_K, OPEN_P, STATES = 8 };

struct Row {
  const float* logits;
  const double* reals;
  const i64* wholes;
  int vocab;

  bool penalised() const {
    return wholes != nullptr && wholes[SEEN_END] > wholes[SEEN_BEGIN];
  }
};

DEV Row row_of(const float* logits, i64 stride, const double* reals, const i64* wholes, int vocab) {
  const int row = blockIdx.y;
  Row r;
  r.logits = logits + row * stride;
  r.reals = reals == nullptr ? nullptr : reals + row * REALS;
  r.wholes = wholes == nullptr ? nullptr : wholes + row * WHOLES;
  r.vocab = vocab;
  return r;
}

// The first of the sorted (id, count) pairs whose id is `id` or more.
DEV i64 first_seen(const int2* seen, i64 begin, i64 end, int id) {
  while (begin < end) {
    const i64 middle = (begin + end) / 2;
    if (seen[middle].x < id) begin = middle + 1; else end = middle;
  }
  return begin;
}

// This thread's logits of a slice after penalties; -inf beyond the vocabulary. All threads call it.
template <bool PENALTIES>
DEV void load_slice(double (&values)[EACH], const Row& row, const int2* seen, int slice,
                    double* adjusted) {
  const int base = slice * SLICE, first = base + threadIdx.x * EACH;
  for (int j = 0; j < EACH; ++j)
    values[j] = first + j < row.vocab ? double(row.logits[first + j]) : -double(infinity());
  if (!PENALTIES || !row.penalised()) return;
  for (int j = 0; j < EACH; ++j) adjusted[threadIdx.x * EACH + j] = values[j];
  const i64 begin = first_seen(seen, row.wholes[SEEN_BEGIN], row.wholes[SEEN_END], base);
  const i64 end = first_seen(seen, begin, row.wholes[SEEN_END], base + SLICE);
  const double repetition = row.reals[REPETITION];
  __syncthreads();
  for (i64 at = begin + threadIdx.x; at < end; at += THREADS) {
    const int2 token = seen[at];
    double value = adjusted[token.x - base];
    if (repetition != 1.0) value = value > 0 ? value / repetition : __dmul_rn(value, repetition);
    if (token.y > 0) {
      const double often = __dmul_rn(row.reals[FREQUENCY], double(token.y));
      value = __dadd_rn(value, -__dadd_rn(often, row.reals[PRESENCE]));
    }
    adjusted[token.x - base] = value;
  }
  __syncthreads();
  for (int j = 0; j < EACH; ++j) values[j] = adjusted[threadIdx.x * EACH + j];
  __syncthreads();
}

// The CTA that is the last of its row, known to all its threads. Resets the ticket.
DEV bool is_last(int* ticket) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = take_ticket(ticket) == int(gridDim.x) - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  return last;
}

// ---- the largest ----

struct Best {
  double value;
  int id;  // negative: NaN or +inf is among them
};

DEV Best better(Best a, Best b) {
  if (a.id < 0 || b.id < 0) return a.id < 0 ? a : b;
  return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}

DEV Best best_of_block(Best mine, double* values, int* ids) {
  values[threadIdx.x] = mine.value;
  ids[threadIdx.x] = mine.id;
  __syncthreads();
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if (int(threadIdx.x) < half) {
      const int other = threadIdx.x + half;
      mine = better(mine, Best{values[other], ids[other]});
      values[threadIdx.x] = mine.value;
      ids[threadIdx.x] = mine.id;
    }
    __syncthreads();
  }
  return Best{values[0], ids[0]};
}

template <bool PENALTIES>
__global__ void __launch_bounds__(THREADS, 2)
sample_scan(i32* out, const float* logits, i64 stride, i32 vocab, const double* reals,
            const i64* wholes, const int2* seen, u64* states, double* best_values, i32* best_ids,
            i32* tickets) {
  __shared__ double adjusted[PENALTIES ? SLICE : 1];
  __shared__ double shared_values[THREADS];
  __shared__ int shared_ids[THREADS];
  const int row = blockIdx.y, slices = gridDim.x;
  const Row r = row_of(logits, stride, reals, wholes, vocab);
  const i64 mode = wholes == nullptr ? GREEDY : r.wholes[MODE];
  if (mode == SKIP) return;

  double values[EACH];
  load_slice<PENALTIES>(values, r, seen, blockIdx.x, adjusted);
  const int first = blockIdx.x * SLICE + threadIdx.x * EACH;
  const double inf = infinity();
  Best mine{-inf, 0x7FFFFFFF};
  for (int j = 0; j < EACH; ++j)
    mine = better(mine, Best{values[j], values[j] < inf ? first + j : -1});
  mine = best_of_block(mine, shared_values, shared_ids);
  if (threadIdx.x == 0) {
    best_values[row * slices + blockIdx.x] = mine.value;
    best_ids[row * slices + blockIdx.x] = mine.id;
  }
  if (!is_last(tickets + row)) return;

  mine = Best{-inf, 0x7FFFFFFF};
  for (int slice = threadIdx.x; slice < slices; slice += THREADS)
    mine = better(mine, Best{ld_cg(best_values + row * slices + slice),
                             ld_cg(best_ids + row * slices + slice)});
  mine = best_of_block(mine, shared_values, shared_ids);
  if (threadIdx.x != 0) return;
  const bool choice = mine.id >= 0 && mine.value > -inf;
  out[row] = choice ? mine.id : -1;
  if (states == nullptr) return;
  u64* state = states + row * STATES;
  const bool draws = choice && mode == DRAW;
  state[LARGEST] = u64(__double_as_longlong(mine.value));
  state[LIMIT] = ~0ull;
  state[LIMIT_ID] = 0x7FFFFFFF;
  state[PREFIX] = 0;
  state[NEED] = draws ? u64(r.wholes[COUNT]) : 0;
  state[OPEN_K] = draws && r.wholes[COUNT] > 0;
  state[OPEN_P] = draws && r.reals[NUCLEUS] < 1.0;
}

// ---- keys and weights ----

struct Scale {
  double largest, inverse, min_p;
  u64 limit, limit_id;

  Scale(const Row& row, const u64* state)
      : largest(__longlong_as_double(i64(state[LARGEST]))),
        inverse(1.0 / row.reals[TEMPERATURE]),
        min_p(row.reals[MIN_P]),
        limit(state[LIMIT]),
        limit_id(state[LIMIT_ID]) {}

  double depth(double value) const {
    const double below = largest - value;
    return below > 0 ? below * inverse : 0;
  }
  // Whether a token may be kept as far as its key says.
  bool within(u64 key, int id) const {
    return key < limit || (key == limit && u64(id) <= limit_id);
  }
  // 0: it is not kept.
  u64 weight(double depth) const {
    const double share = exp(-depth);
    if (share < min_p) return 0;
    const u64 weight = u64(share * double(1ull << WEIGHT_POINT) + 0.5);
    return weight > 0 ? weight : 1;
  }
  // Whether the weight is not 0; mostly without computing it.
  bool weighs(double depth) const { return !(min_p > 0) || !(exp(-depth) < min_p); }
};

DEV u64 key_of(double depth) { return u64(depth * double(1ull << KEY_POINT)); }

// Sums of all threads before this one; `all` gets the sum of every thread's.
DEV u64 sum_before(u64 mine, u64* shared, u64& all) {
  u64 sum = mine;
  shared[threadIdx.x] = sum;
  __syncthreads();
  for (int step = 1; step < THREADS; step *= 2) {
    const u64 other = int(threadIdx.x) >= step ? shared[threadIdx.x - step] : 0;
    __syncthreads();
    sum += other;
    shared[threadIdx.x] = sum;
    __syncthreads();
  }
  all = shared[THREADS - 1];
  __syncthreads();
  return sum - mine;
}

template <bool PENALTIES>
__global__ void __launch_bounds__(THREADS, 2)
sample_narrow(i32 phase, i32 level, const float* logits, i64 stride, i32 vocab,
              const double* reals, const i64* wholes, const int2* seen, u64* states,
              u32* all_counts, u64* all_sums, i32* tickets) {
  __shared__ double adjusted[PENALTIES ? SLICE : 1];
  __shared__ u32 counts[BINS];
  __shared__ u64 sums[BINS];
  const int row = blockIdx.y;
  u64* state = states + row * STATES;
  const Row r = row_of(logits, stride, reals, wholes, vocab);
  if (r.wholes[MODE] != DRAW || state[phase == TOP_K ? OPEN_K : OPEN_P] != 1) return;

  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) counts[bin] = 0, sums[bin] = 0;
  __syncthreads();
  const Scale scale(r, state);
  const u64 prefix = state[PREFIX];
  const int shift = KEY_BITS - DIGIT * (level + 1);
  for (int slice = blockIdx.x; slice * SLICE < vocab; slice += gridDim.x) {
    double values[EACH];
    load_slice<PENALTIES>(values, r, seen, slice, adjusted);
    const int first = slice * SLICE + threadIdx.x * EACH;
    for (int j = 0; j < EACH; ++j) {
      const double depth = scale.depth(values[j]);
      if (!(depth < FAR)) continue;
      const u64 key = key_of(depth);
      if (level > 0 && key >> (shift + DIGIT) != prefix) continue;
      if (!scale.within(key, first + j)) continue;
      const int bin = int(key >> shift) & (BINS - 1);
      if (phase == TOP_K) {
        if (!scale.weighs(depth)) continue;
      } else {
        const u64 weight = scale.weight(depth);
        if (weight == 0) continue;
        atomicAdd(sums + bin, weight);
      }
      atomicAdd(counts + bin, 1u);
    }
  }
  __syncthreads();
  u32* row_counts = all_counts + row * BINS;
  u64* row_sums = all_sums + row * BINS;
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS)
    if (counts[bin] != 0) {
      atomicAdd(row_counts + bin, counts[bin]);
      if (phase == TOP_P) atomicAdd(row_sums + bin, sums[bin]);
    }
  if (!is_last(tickets + row)) return;

  // The bin in which what is needed is reached.
  u32 bin_counts[BINS_EACH];
  u64 bins[BINS_EACH], mine = 0;
  for (int j = 0; j < BINS_EACH; ++j) {
    const int bin = threadIdx.x * BINS_EACH + j;
    bin_counts[j] = ld_cg(row_counts + bin);
    bins[j] = phase == TOP_K ? u64(bin_counts[j]) : ld_cg(row_sums + bin);
    mine += bins[j];
    row_counts[bin] = 0;
    row_sums[bin] = 0;
  }
  u64 need = state[NEED], all, before = sum_before(mine, sums, all);
  if (phase == TOP_P && level == 0) {
    need = u64(ceil(r.reals[NUCLEUS] * double(all)));
    need = need < 1 ? 1 : need > all ? all : need;
  }
  const int open = phase == TOP_K ? OPEN_K : OPEN_P;
  if (all <= need) {  // on the first level only: everything is kept
    if (threadIdx.x == 0) state[open] = 0;
    return;
  }
  for (int j = 0; j < BINS_EACH; ++j) {
    if (before < need && need <= before + bins[j]) {
      const u64 found = (level > 0 ? prefix << DIGIT : 0) | u64(threadIdx.x * BINS_EACH + j);
      const bool whole = need == before + bins[j] || bin_counts[j] == 1;
      const u64 end = ((found + 1) << shift) - 1;
      if (whole && end < scale.limit) {  // else what top-k left ends within the bin
        state[LIMIT] = end;
        state[LIMIT_ID] = 0x7FFFFFFF;
      }
      state[PREFIX] = found;
      state[NEED] = need - before;
      state[open] = whole ? 0 : level + 1 < LEVELS ? 1 : 2;
    }
    before += bins[j];
  }
}

// ---- the draw ----

// Philox 4x32-10 (Salmon et al., SC 2011), as workers.philox: a number of [0, 1), 53 bits.
DEV double uniform(const i64* wholes) {
  u32 key0 = u32(u64(wholes[SEED])), key1 = u32(u64(wholes[SEED]) >> 32);
  u32 word0 = u32(u64(wholes[INDEX])), word1 = u32(u64(wholes[INDEX]) >> 32);
  u32 word2 = u32(u64(wholes[SEQUENCE])), word3 = 0;
  for (int round = 0; round < 10; ++round) {
    const u64 a = u64(0xD2511F53u) * word0, b = u64(0xCD9E8D57u) * word2;
    word0 = u32(b >> 32) ^ word1 ^ key0;
    word1 = u32(b);
    word2 = u32(a >> 32) ^ word3 ^ key1;
    word3 = u32(a);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return double((u64(word0) << 21) | (word1 >> 11)) * (1.0 / double(1ull << 53));
}

// What each of this thread's tokens of a slice adds to the sum that is searched.
template <bool PENALTIES>
DEV u64 addends(u64 (&each)[EACH], i32 phase, const Row& r, const int2* seen, const u64* state,
                int slice, double* adjusted) {
  double values[EACH];
  load_slice<PENALTIES>(values, r, seen, slice, adjusted);
  const Scale scale(r, state);
  const u64 prefix = state[PREFIX];
  const int first = slice * SLICE + threadIdx.x * EACH;
  u64 sum = 0;
  for (int j = 0; j < EACH; ++j) {
    each[j] = 0;
    const double depth = scale.depth(values[j]);
    if (!(depth < FAR)) continue;
    const u64 key = key_of(depth);
    if ((phase != CHOICE && key != prefix) || !scale.within(key, first + j)) continue;
    each[j] = phase == TOP_K ? u64(scale.weighs(depth)) : scale.weight(depth);
    sum += each[j];
  }
  return sum;
}

template <bool PENALTIES>
__global__ void __launch_bounds__(THREADS, 2)
sample_find(i32 phase, i32* out, const float* logits, i64 stride, i32 vocab, const double* reals,
            const i64* wholes, const int2* seen, u64* states, u64* slice_sums, i32* tickets) {
  __shared__ double adjusted[PENALTIES ? SLICE : 1];
  __shared__ u64 shared[THREADS];
  __shared__ u64 left;
  __shared__ int slice;
  const int row = blockIdx.y, slices = gridDim.x;
  u64* state = states + row * STATES;
  const Row r = row_of(logits, stride, reals, wholes, vocab);
  if (r.wholes[MODE] != DRAW || out[row] < 0) return;
  if (phase != CHOICE && state[phase == TOP_K ? OPEN_K : OPEN_P] != 2) return;

  u64 each[EACH], all;
  u64 mine = addends<PENALTIES>(each, phase, r, seen, state, blockIdx.x, adjusted);
  sum_before(mine, shared, all);
  if (threadIdx.x == 0) slice_sums[row * slices + blockIdx.x] = all;
  if (!is_last(tickets + row)) return;

  // The slice in which what is needed is reached; each thread looks at some that follow each other.
  const int each_slices = (slices + THREADS - 1) / THREADS, begin = threadIdx.x * each_slices;
  mine = 0;
  for (int at = begin; at < begin + each_slices && at < slices; ++at)
    mine += ld_cg(slice_sums + row * slices + at);
  u64 before = sum_before(mine, shared, all);
  u64 need = state[NEED];
  if (phase == CHOICE) {
    need = u64(uniform(r.wholes) * double(all)) + 1;
    need = need > all ? all : need;
  }
  for (int at = begin; at < begin + each_slices && at < slices; ++at) {
    const u64 sum = ld_cg(slice_sums + row * slices + at);
    if (before < need && need <= before + sum) slice = at, left = need - before;
    before += sum;
  }
  __syncthreads();
  mine = addends<PENALTIES>(each, phase, r, seen, state, slice, adjusted);
  before = sum_before(mine, shared, all);
  need = left;
  for (int j = 0; j < EACH; ++j) {
    if (before < need && need <= before + each[j]) {
      const int id = slice * SLICE + threadIdx.x * EACH + j;
      if (phase == CHOICE) {
        out[row] = id;
      } else {
        state[LIMIT] = state[PREFIX];
        state[LIMIT_ID] = u64(id);
        state[phase == TOP_K ? OPEN_K : OPEN_P] = 0;
      }
    }
    before += each[j];
  }
}
