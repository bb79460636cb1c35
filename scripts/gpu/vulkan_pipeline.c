// Compiles one compute shader for the first Vulkan device and prints what the driver says of it: statistics, then its assembly.
//   vulkan_pipeline SHADER.spv SUBGROUP [constant ...]
// SUBGROUP: the size that is required, 0 for any; constants: specialisation constants 0, 1, ... The device need not be able to run anything
// (RADV_FORCE_FAMILY). For vulkan_instructions.py.
#include <stdio.h>
#include <stdlib.h>
#include <vulkan/vulkan.h>

enum { N_BINDINGS = 8, PUSH_BYTES = 128, MAX_CONSTANTS = 16 };

#define CHECK(call)                                             \
    do {                                                        \
        const VkResult result = (call);                         \
        if (result < 0) {                                       \
            fprintf(stderr, "error: %s: %d\n", #call, result);  \
            exit(1);                                            \
        }                                                       \
    } while (0)

static void * room(size_t n, size_t size) {
    void * p = calloc(n ? n : 1, size);
    if (p == NULL) {
        exit(1);
    }
    return p;
}

static VkDevice create_device(void) {
    const VkApplicationInfo app = {.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO, .apiVersion = VK_API_VERSION_1_3};
    const VkInstanceCreateInfo instance_info = {.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO, .pApplicationInfo = &app};
    VkInstance       instance;
    VkPhysicalDevice physical;
    uint32_t         n = 1;
    CHECK(vkCreateInstance(&instance_info, NULL, &instance));
    CHECK(vkEnumeratePhysicalDevices(instance, &n, &physical));
    if (n == 0) {
        fprintf(stderr, "error: no Vulkan device\n");
        exit(1);
    }
    // all features that it has: shaders may use any
    VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR executables = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PIPELINE_EXECUTABLE_PROPERTIES_FEATURES_KHR};
    VkPhysicalDeviceVulkan13Features f13 = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES, .pNext = &executables};
    VkPhysicalDeviceVulkan12Features f12 = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES, .pNext = &f13};
    VkPhysicalDeviceVulkan11Features f11 = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES, .pNext = &f12};
    VkPhysicalDeviceFeatures2 features = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, .pNext = &f11};
    vkGetPhysicalDeviceFeatures2(physical, &features);
    features.features.robustBufferAccess = VK_FALSE; // as ggml-vulkan
    const float priority = 1;
    const char * extension = VK_KHR_PIPELINE_EXECUTABLE_PROPERTIES_EXTENSION_NAME;
    const VkDeviceQueueCreateInfo queue = {.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO, .queueCount = 1, .pQueuePriorities = &priority};
    const VkDeviceCreateInfo info = {.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, .pNext = &features, .queueCreateInfoCount = 1, .pQueueCreateInfos = &queue,
                                     .enabledExtensionCount = 1, .ppEnabledExtensionNames = &extension};
    VkDevice device;
    CHECK(vkCreateDevice(physical, &info, NULL, &device));
    return device;
}

static VkShaderModule load_shader(VkDevice device, const char * path) {
    FILE * file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        fprintf(stderr, "error: %s cannot be read\n", path);
        exit(1);
    }
    const size_t size = (size_t) ftell(file);
    uint32_t *   code = room(size, 1);
    rewind(file);
    if (fread(code, 1, size, file) != size) {
        exit(1);
    }
    fclose(file);
    const VkShaderModuleCreateInfo info = {.sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO, .codeSize = size, .pCode = code};
    VkShaderModule shader;
    CHECK(vkCreateShaderModule(device, &info, NULL, &shader));
    free(code);
    return shader;
}

static VkPipelineLayout create_layout(VkDevice device) {
    VkDescriptorSetLayoutBinding bindings[N_BINDINGS];
    for (uint32_t i = 0; i < N_BINDINGS; ++i) {
        bindings[i] = (VkDescriptorSetLayoutBinding) {.binding = i, .descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, .descriptorCount = 1,
                                                      .stageFlags = VK_SHADER_STAGE_COMPUTE_BIT};
    }
    const VkDescriptorSetLayoutCreateInfo set_info = {.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO, .bindingCount = N_BINDINGS,
                                                      .pBindings = bindings};
    VkDescriptorSetLayout set;
    CHECK(vkCreateDescriptorSetLayout(device, &set_info, NULL, &set));
    const VkPushConstantRange push = {.stageFlags = VK_SHADER_STAGE_COMPUTE_BIT, .size = PUSH_BYTES};
    const VkPipelineLayoutCreateInfo info = {.sType = VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO, .setLayoutCount = 1, .pSetLayouts = &set,
                                             .pushConstantRangeCount = 1, .pPushConstantRanges = &push};
    VkPipelineLayout layout;
    CHECK(vkCreatePipelineLayout(device, &info, NULL, &layout));
    return layout;
}

static VkPipeline create_pipeline(VkDevice device, const char * path, uint32_t subgroup, uint32_t n_constants, const uint32_t * constants) {
    VkSpecializationMapEntry entries[MAX_CONSTANTS];
    for (uint32_t i = 0; i < n_constants; ++i) {
        entries[i] = (VkSpecializationMapEntry) {i, i*sizeof(uint32_t), sizeof(uint32_t)};
    }
    const VkSpecializationInfo specialisation = {n_constants, entries, n_constants*sizeof(uint32_t), constants};
    const VkPipelineShaderStageRequiredSubgroupSizeCreateInfo required = {
        .sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO, .requiredSubgroupSize = subgroup};
    const VkComputePipelineCreateInfo info = {
        .sType  = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO,
        .flags  = VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR | VK_PIPELINE_CREATE_CAPTURE_INTERNAL_REPRESENTATIONS_BIT_KHR,
        .stage  = {.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO, .pNext = subgroup ? &required : NULL,
                   .flags = subgroup ? VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT : 0, .stage = VK_SHADER_STAGE_COMPUTE_BIT,
                   .module = load_shader(device, path), .pName = "main", .pSpecializationInfo = &specialisation},
        .layout = create_layout(device),
    };
    VkPipeline pipeline;
    CHECK(vkCreateComputePipelines(device, VK_NULL_HANDLE, 1, &info, NULL, &pipeline));
    return pipeline;
}

static void print_statistics(VkDevice device, const VkPipelineExecutableInfoKHR * executable) {
    const PFN_vkGetPipelineExecutableStatisticsKHR get = (PFN_vkGetPipelineExecutableStatisticsKHR) vkGetDeviceProcAddr(device, "vkGetPipelineExecutableStatisticsKHR");
    uint32_t n = 0;
    CHECK(get(device, executable, &n, NULL));
    VkPipelineExecutableStatisticKHR * found = room(n, sizeof(*found));
    for (uint32_t i = 0; i < n; ++i) {
        found[i].sType = VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_STATISTIC_KHR;
    }
    CHECK(get(device, executable, &n, found));
    for (uint32_t i = 0; i < n; ++i) {
        printf("statistic %s: %llu\n", found[i].name, (unsigned long long) found[i].value.u64);
    }
    free(found);
}

static void print_representations(VkDevice device, const VkPipelineExecutableInfoKHR * executable) {
    const PFN_vkGetPipelineExecutableInternalRepresentationsKHR get =
        (PFN_vkGetPipelineExecutableInternalRepresentationsKHR) vkGetDeviceProcAddr(device, "vkGetPipelineExecutableInternalRepresentationsKHR");
    uint32_t n = 0;
    CHECK(get(device, executable, &n, NULL));
    VkPipelineExecutableInternalRepresentationKHR * found = room(n, sizeof(*found));
    for (uint32_t i = 0; i < n; ++i) {
        found[i].sType = VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_INTERNAL_REPRESENTATION_KHR;
    }
    CHECK(get(device, executable, &n, found));
    for (uint32_t i = 0; i < n; ++i) {
        found[i].pData = room(found[i].dataSize + 1, 1);
    }
    CHECK(get(device, executable, &n, found));
    for (uint32_t i = 0; i < n; ++i) {
        printf("representation %s\n%s\n", found[i].name, (const char *) found[i].pData);
    }
}

int main(int argc, char ** argv) {
    uint32_t constants[MAX_CONSTANTS];
    if (argc < 3 || argc - 3 > MAX_CONSTANTS) {
        fprintf(stderr, "usage: %s SHADER.spv SUBGROUP [constant ...]\n", argv[0]);
        return 1;
    }
    for (int i = 3; i < argc; ++i) {
        constants[i - 3] = (uint32_t) strtoul(argv[i], NULL, 10);
    }
    const VkDevice   device   = create_device();
    const VkPipeline pipeline = create_pipeline(device, argv[1], (uint32_t) strtoul(argv[2], NULL, 10), (uint32_t) argc - 3, constants);
    const VkPipelineExecutableInfoKHR executable = {.sType = VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_INFO_KHR, .pipeline = pipeline};
    print_statistics(device, &executable);
    print_representations(device, &executable);
    fflush(stdout);
    _Exit(0); // drivers without a device may crash at their end
}
