Two requests share a prefix of two blocks; the pool is full.
Rule: a victim counts only for the blocks that nobody else holds.

given
    block size 2
    worker w0 blocks 6 step 20
    store s0 budget 16
    gateway g0
    client c0 prompt 5 shared 4 max 6
    client c1 prompt 5 shared 4 max 6
    client c2 prompt 3 max 4
    set prefix_cache true

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see w0 -> g0 Tokens c1 index=0
    come c2
    finish
    expect c0 tokens == 6
    expect c1 tokens == 6
    expect c2 tokens == 4
