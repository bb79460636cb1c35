#!/bin/sh
# glslc that writes four bytes in place of shaders that the tests of the Vulkan backend do not use. A quarter of all remains: ours, and
# the upstream shaders that a model with tensors in F32, F16 and Q8_0 runs on lavapipe.
before=
for argument in "$@"; do
    [ "$before" = -o ] && out=$argument
    before=$argument
done
name=$(basename "${out:-}" .spv)
case $name in
    '') ;;
    *itq*|*ccq2*|*ditto[35]*|ggml_ext_*) ;;
    *q[12]_0*|*q[45]_[01]*|*q[2-6]_k*|*iq[1-4]_*|*fp4*|*tq[12]_*|*bf16*|*_cm[12]|*_dot2*|*_fp32|\
    *_back*|*conv*|*pool*|*im2col*|*wkv*|*ssm*|*opt_step*|*loss*|geglu*|reglu*|*gelu*|*relu*|*elu_*|abs*|ceil*|\
    floor*|round*|trunc*|hard*|exp_*|expm1*|*tri_*|pad*|fill*|diag*|cumsum*|upscale*|rope_multi*|rope_vision*|sin_*|cos_*|tanh*|xielu*)
        printf stub > "$out"
        exit 0 ;;
esac
exec glslc "$@"
