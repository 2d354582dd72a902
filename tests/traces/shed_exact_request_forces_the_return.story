An exact request that comes while the planes are away forces them back: once they have been away for
their least time it is let in, who needs the tail is swapped out, and it runs in FP16. Then the
other sheds them again and finishes; nobody loses a token.

given
    block size 2
    worker w0 blocks 20 tail 10 return 20 step 20
    store s0 budget 64
    gateway g0
    set levels 2
    client c0 prompt 4 max 54
    client c1 prompt 2 max 4 exact true
    set reserve_slack_tokens 8

story
    come c0
    see w0 hears PlanesShed
    come c1
    run 100
    expect w0 planes == open
    see k1 -> w0 Admit c1
    see w0 -> k1 WorkerReport shed.state=closing
    never w0 -> g0 Tokens c1
    see w0 hears PlanesRestored
    allow
    expect w0 has c1 prefill
    expect w0 lacks c0
    expect w0 requests_swapped_total == 1
    see w0 -> g0 Tokens c1 index=0
    see w0 hears PlanesShed
    finish
    expect c0 tokens == 54
    expect c1 tokens == 4
    expect w0 sheds == 2
