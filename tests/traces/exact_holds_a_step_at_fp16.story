Two requests share their steps. One is exact: while it runs the steps are at level 0, and before and
behind it, where the policy is left alone, at the top one.

given
    block size 2
    worker w0 blocks 16 step 5
    store s0 budget 8
    gateway g0
    client c0 prompt 4 max 24
    client c1 prompt 4 max 3 exact true
    set levels 3
    set precision fp8

story
    come c0
    see w0 -> g0 Tokens c0 index=2
    expect w0 precision.level == 2
    come c1
    see w0 -> g0 Tokens c1 index=0
    expect w0 precision.level == 0
    see g0 -> c1 Finished
    run 30
    expect w0 precision.level == 2
    expect w0 has c0 decode
    finish
    expect c0 tokens == 24
    expect c1 tokens == 3
