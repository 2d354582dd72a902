A worker is stopped, taken for dead, and another one generates other tokens. That one dies too; a
new controller finds the first run alive and lets it go on in place.
Rule: the tokens a gateway holds are the truth: the worker's own end where the two part.

given
    block size 2
    worker w0 blocks 10 step 20
    worker w1 blocks 8 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 4 max 11
    set noisy true

story
    come c0
    see w0 -> g0 Tokens c0 index=1
    stop w0
    cut w0 g0
    see k1 -> w1 Admit c0
    see w1 -> g0 Tokens c0 index=6
    kill k1
    kill w1
    hold w0 -> g0 Attach c0
    go w0
    replace k
    see k2 -> w0 Admit c0
    expect w0 has c0
    release
    see g0 -> w0 AttachRefused c0
    see g0 -> w0 Attached c0
    finish
    expect c0 tokens == 11
