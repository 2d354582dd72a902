A gateway dies with a run that is alive; the client resumes at its successor.
Rule: run numbers come from the controller, so the successor's run is higher than the living one,
and Attach takes over in place, KV and all.

given
    block size 2
    worker w0 blocks 8 step 20
    store s0 budget 8
    gateway g0 g1
    client c0 prompt 4 max 10

story
    come c0
    see w0 -> g1 Tokens c0 index=1
    kill g1
    see w0 -> g0 Attach c0
    see g0 -> w0 Attached c0
    see w0 -> g0 Tokens c0
    start g1
    finish
    expect c0 tokens == 10
    expect w0 tokens_computed == 13
