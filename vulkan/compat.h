// Declarations of VK_EXT_layer_settings (Vulkan 1.3.272) for older headers; Debian 12 has 1.3.239. Only a validation layer with the
// extension reads the structure; other implementations skip unknown structures.
#pragma once

#include <vulkan/vulkan.hpp>

#ifndef VK_EXT_layer_settings
namespace vk {

enum class LayerSettingTypeEXT { eBool32 = 0 };

struct LayerSettingEXT {
    const char *        pLayerName;
    const char *        pSettingName;
    LayerSettingTypeEXT type;
    uint32_t            valueCount;
    const void *        pValues;
};

struct LayerSettingsCreateInfoEXT {
    VkStructureType         sType = (VkStructureType) 1000496000;
    const void *            pNext = nullptr;
    uint32_t                settingCount;
    const LayerSettingEXT * pSettings;

    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings)
        : settingCount((uint32_t) settings.size()), pSettings(settings.data()) {}
};

} // namespace vk
#endif
