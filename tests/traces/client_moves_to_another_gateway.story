A client's connection breaks and it comes back at another gateway: that one takes over, the first
one lets go, and the run goes on in place.

given
    block size 2
    worker w0 blocks 8 step 20
    store s0 budget 8
    gateway g0 g1
    client c0 prompt 4 max 10

story
    come c0
    see w0 -> g1 Tokens c0 index=1
    break c0
    see k1 -> g1 ReportReply
    see w0 -> g0 Attach c0
    see g0 -> w0 Attached c0
    finish
    expect c0 tokens == 10
    expect g1 live_requests == 0
    expect w0 tokens_computed == 13
