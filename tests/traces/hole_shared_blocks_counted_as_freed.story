Two requests share a prefix of two blocks; a third needs four blocks and two are free.
Rule: a victim counts only for the blocks that nobody else holds, so both have to leave.

given
    block size 8
    worker w0 blocks 6 step 40
    store s0 budget 16
    gateway g0
    client c0 prompt 17 shared 16 max 7
    client c1 prompt 17 shared 16 max 7
    client c2 prompt 25 max 7
    set prefix_cache true

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see w0 -> g0 Tokens c1 index=0
    expect w0 blocks_free == 2
    hold w0 -> s0 Commit c1
    come c2
    see k1 -> w0 SwapOut c1
    run 20
    expect w0 has c0 swapping_out
    expect w0 has c1 swapping_out
    finish
    expect c0 tokens == 7
    expect c1 tokens == 7
    expect c2 tokens == 7
