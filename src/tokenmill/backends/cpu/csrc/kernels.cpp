// Compiled once for each instruction set (TM_ISA names it): the kernels, and the table that hands them out.
#include "kernels.h"

#include "attention.inl.h"
#include "ceilings.inl.h"
#include "codes.inl.h"
#include "linear.inl.h"
#include "rows.inl.h"

#define TM_STR2(x) #x
#define TM_STR(x) TM_STR2(x)

namespace mill {

extern const KernelTable TM_CAT(table_, TM_ISA);
const KernelTable TM_CAT(table_, TM_ISA) = {
    TM_STR(TM_ISA),
    TM_NS::TILE,
    TM_NS::linear,
    TM_NS::unpack_row,
    TM_NS::quantise,
    TM_NS::rms_norm,
    TM_NS::add_rows,
    TM_NS::act_mul,
    TM_NS::rope,
    {{TM_NS::kv_write<uint16_t>, TM_NS::attention<uint16_t>, TM_NS::attention_segment<uint16_t>},
     {TM_NS::kv_write<float>, TM_NS::attention<float>, TM_NS::attention_segment<float>}},
    TM_NS::attention_merge,
    TM_NS::max_finite,
    TM_NS::max_of,
    TM_NS::sum_exp,
    TM_NS::weights,
    {TM_NS::read_loop, {"fma", TM_NS::FMA_OPS, TM_NS::fma_loop}, {TM_NS::DOT_RECIPE, TM_NS::DOT_OPS, TM_NS::dot_loop}},
};

}  // namespace mill
