A client is lost without a word: its request goes on for the grace, in case it comes back, and then
everything it holds is freed.

given
    block size 2
    worker w0 blocks 32 step 30
    store s0 budget 8
    gateway g0
    client c0 prompt 4 max 60

story
    come c0
    see w0 -> g0 Tokens c0 index=1
    leave c0
    run 1000
    expect w0 has c0 decode
    expect g0 live_requests == 1
    see g0 -> w0 Drop c0
    run 100
    expect w0 lacks c0
    expect g0 live_requests == 0
    expect w0 blocks_free == 32
    finish
