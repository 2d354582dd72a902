No planes return for an exact request in the time that it is given: it ends with an error that says
why, and the others go on.

given
    block size 2
    worker w0 blocks 6 tail 4 return 50 step 20 fails 1
    store s0 budget 16
    gateway g0
    set levels 2
    client c0 prompt 4 max 14
    client c1 prompt 2 max 4 exact true
    set shed_exact_wait_ms 500

story
    come c0
    see w0 hears PlanesShed
    come c1
    see k1 -> w0 Admit c1
    run 900
    expect c1 failure == exhausted
    finish
    expect c0 tokens == 14
