A token is generated, the gateway never gets it, and the payload that goes to the store has it.
Rule: the manifest carries token ids; what is beyond the gateway's tokens is sent again, and what
the payload lacks is computed.

given
    block size 2
    worker w0 blocks 4 step 20
    worker w1 blocks 4 step 20
    store s0 budget 8 node n1
    gateway g0
    client c0 prompt 2 max 6
    client c1 prompt 2 max 6
    client c2 prompt 2 max 6

story
    come c0 c1
    see w0 -> g0 Tokens c0 index=0
    hold w0 -> g0 Tokens c0 index=1
    run 45
    come c2
    finish
    expect c0 tokens == 6
